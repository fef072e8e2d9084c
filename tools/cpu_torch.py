"""Lets a PyTorch that was built for CUDA run on CPUs, without gigabytes of NVIDIA's libraries.

    python -m tools.cpu_torch SITE_PACKAGES

PyPI has PyTorch for Linux with CUDA only, and importing it needs a dozen libraries beside it. In
their places this puts libraries whose functions all answer "no device". It is for tests: the
schedules, gloo and computing on CPUs are PyTorch's own, and torch.cuda.is_available() is False.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_NO_DEVICE = 100  # cudaErrorNoDevice
_NVIDIAS = re.compile(r"lib(cu|nv|nccl)")


def main(site_packages: Path) -> None:
    """Make stubs of NVIDIA's libraries that a torch without them still loads."""
    library = site_packages / "torch" / "lib"
    wanted: set[str] = set()
    defined: set[str] = set()
    missing: set[str] = set()
    home: dict[str, str] = {}  # version of a symbol -> the library that has it
    for file in library.glob("*.so*"):
        needed = re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-d", file))
        missing |= {name for name in needed if _NVIDIAS.match(name)}
        for block in re.split(r"File: ", _said("readelf", "-V", file))[1:]:
            home |= dict.fromkeys(re.findall(r"Name: (\S+)", block), block.split()[0])
        for *_, kind, name in map(str.split, _said("nm", "-D", file).splitlines()):
            (wanted if kind == "U" else defined).add(name if kind == "U" else name.split("@")[0])
    missing -= {"libcuda.so.1"}  # the driver's, which PyTorch opens only when it computes
    runtime = next(name for name in missing if name.startswith("libcudart"))
    functions: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for symbol in wanted:
        name, _, version = symbol.partition("@")
        file_name = home.get(version, "") if version else runtime
        nvidias = version or re.match(r"(__)?(cu|nccl|nv)", name)
        if nvidias and name not in defined and file_name in missing:
            functions[file_name][version].add(name)
    for file_name in sorted(missing):
        _build(library / file_name, functions[file_name])


def _build(path: Path, functions: dict[str, set[str]]) -> None:
    code = "".join(
        f"long {name}(void) {{ return {_NO_DEVICE}; }}\n"
        for names in functions.values()
        for name in sorted(names)
    )
    versions = "".join(
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
        for version, names in functions.items()
        if version
    )
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "none.c"), Path(folder, "versions")
        source.write_text(code or "int nothing;\n")
        script.write_text(versions)
        compiler = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        scripted = [f"-Wl,--version-script={script}"] if versions else []
        subprocess.run([*compiler, "-o", path, source, *scripted], check=True)


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
