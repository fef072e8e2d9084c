"""The base of all limits: conditions that a plan keeps besides its deadline.

Each limit is one file of this folder and answers everything about itself: the search, the command
line, sweeps, plan.json, `envplan check` and the other readers ask it, and know none by name. The
list of limits is in `__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self

from envplan._io.documents import Model
from envplan.errors import InputError
from envplan.quantities import Quantity

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.profile import Profile
    from envplan.replay import Problem, Replay, Rows
    from envplan.replay.noise import NoisyRun
    from envplan.request.limits.robustness import Robustness

#: What plan.json's target calls the fastest plan that keeps limits.
FastestKind = Literal["energy-budget", "power-cap", "peak-power-cap", "fastest"]


@dataclass(frozen=True)
class LimitContext:
    """The facts that a limit must know besides a replay.

    Attributes:
        num_gpus: GPUs that each operation of the replay stands for.
        deadline_ns: by when an iteration must be over, ns.
        profile: whose options the replay runs.
        run: the run that has to be over in time instead of an iteration, where there is one.
        sync_ns: when a straggler, or the slowest of the other replicas, has finished, ns: until
            then everybody waits. 0: nobody waits.
    """

    num_gpus: int
    deadline_ns: int
    profile: Profile
    run: NoisyRun | None = None
    sync_ns: int = 0


@dataclass(frozen=True)
class StatedResults:
    """Results that a plan's file states, for limits to prove.

    Attributes:
        energy_j: of an iteration over all GPUs.
        average_power_w: over all GPUs.
        robustness: how sure the deadline is held; None where times are exact.
        run: the run whose costs are stated with a deadline of its own, where there is one.
    """

    energy_j: float
    average_power_w: float
    robustness: Robustness | None = None
    run: NoisyRun | None = None


@dataclass(frozen=True)
class Penalties:
    """Penalties of the search's moves, for violations that a single move can mend.

    Attributes:
        min_dwell_ns: least time between two clock requests of a stage; 0: any.
        peak_10uw: most power of one GPU a stage together at any moment; None: any.
    """

    min_dwell_ns: int = 0
    peak_10uw: int | None = None

    def __bool__(self) -> bool:
        return self != NO_PENALTIES

    def combine(self, other: Penalties) -> Penalties:
        """The stricter of both, of each kind."""
        peaks = [peak for peak in (self.peak_10uw, other.peak_10uw) if peak is not None]
        return Penalties(
            min_dwell_ns=max(self.min_dwell_ns, other.min_dwell_ns),
            peak_10uw=min(peaks, default=None),
        )


NO_PENALTIES: Final = Penalties()


class KindReplay(NamedTuple):
    """The replay of one kind of replicas.

    Attributes:
        replay: of the kind's plan.
        num_gpus: GPUs of all these replicas that each operation stands for.
    """

    replay: Replay
    num_gpus: int


@dataclass(frozen=True)
class WholeJob:
    """An iteration of all kinds of replicas together.

    Attributes:
        energy_j: of all GPUs, waiting for the slowest kind included.
        sync_ns: when the slowest kind has finished, ns.
        replays: makes the replay of each kind.
    """

    energy_j: float
    sync_ns: int
    replays: Callable[[], Sequence[KindReplay]]


@dataclass(frozen=True, kw_only=True)
class SweepKey:
    """How a sweep's file and table give a number of a limit.

    Attributes:
        column_suffix: of the column's name, such as "_ms"; "" for a target, which has no column
            of its own.
        divisor: the number in the file divided by this is the number in the limit's unit.
        phrase: what rows of a table say of it, such as "clocks for {:g} ms".
    """

    column_suffix: str = ""
    divisor: int = 1
    phrase: str


@dataclass(frozen=True, kw_only=True)
class LimitOption:
    """How people give a number of a limit: in Python, on the command line, in a sweep's file.

    Attributes:
        field: of the limit that takes the number.
        keyword: of `Frontier.plan` and `Request.from_options`.
        older_keyword: another name that is still taken; "": none.
        flag: on the command line, without its dashes; also the key of a sweep's file; "": none.
        quantity: what the command line parses.
        divisor: the parsed number divided by this is the number in the limit's unit.
        metavar: what `--help` calls the number.
        help: its sentence in `--help`.
        panel: of `--help`.
        zero_is_none: 0 asks for no limit.
        sweep: how sweeps give it; None: they do not, or by a key of their own.
    """

    field: str
    keyword: str
    older_keyword: str = ""
    flag: str = ""
    quantity: Quantity
    divisor: int = 1
    metavar: str = ""
    help: str = ""
    panel: str = ""
    zero_is_none: bool = False
    sweep: SweepKey | None = None

    @property
    def parameter(self) -> str:
        """The flag as a name in Python."""
        return self.flag.replace("-", "_")

    def value_from(self, options: Mapping[str, Any]) -> Any:
        """The number that keyword arguments give; None where they do not."""
        value = options.get(self.keyword)
        if value is None:
            value = options.get(self.older_keyword)
        if value is None or (self.zero_is_none and value == 0):
            return None
        return value if self.quantity.whole else as_float(value)


class Limit(Model, ABC):
    """A condition on the replay of a plan; the base of all limits.

    Attributes:
        kind: what files call it.
        options: how people ask for it: the first number asks, the others say more.
        stated_as: what plan.json's target calls the fastest plan that keeps it; None where the
            limit alone does not ask for the fastest plan.
        obstacle: why plans may be hard to find under it, after "where".
        eases_beyond_t_star: plans slower than T_star may keep it where T_star's do not.
        counts_all_gpus: it is in J or W of all GPUs, and so of one number of them.
        can_relieve: it knows which operations to change where it is broken (relieve).
        kept_by_sooner_ends: who keeps it, keeps it as well with operations that end sooner.
    """

    options: ClassVar[tuple[LimitOption, ...]]
    stated_as: ClassVar[FastestKind | None] = None
    obstacle: ClassVar[str] = ""
    eases_beyond_t_star: ClassVar[bool] = False
    counts_all_gpus: ClassVar[bool] = False
    can_relieve: ClassVar[bool] = False
    kept_by_sooner_ends: ClassVar[bool] = False

    kind: str

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self | None:
        """The limit that keyword arguments ask for; None where they do not.

        Raises:
            InputError: a number is out of range, or goes with one that is not given.
        """
        main = cls.options[0]
        asks = main.value_from(options) is not None
        fields = {}
        for option in cls.options:
            value = option.value_from(options)
            if value is None:
                continue
            if asks:
                fields[option.field] = value
            elif option.flag:
                raise InputError(
                    f"{option.keyword} goes with a {main.keyword} (--{main.flag} {main.metavar})"
                )
        return cls.of(**fields) if asks else None

    def target_fields(self) -> dict[str, float]:
        """Fields of plan.json's target that repeat it."""
        return {}

    # The search.

    @abstractmethod
    def violation(self, replay: Replay, context: LimitContext) -> int:
        """By how much a replay breaks it, in whole units of its own; 0 where it keeps it."""

    def penalties(self, num_gpus: int) -> Penalties:
        """The penalties of moves that break it: none, if it is a condition on the whole plan.

        Args:
            num_gpus: GPUs that each operation stands for.
        """
        del num_gpus
        return NO_PENALTIES

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Refuse a limit that nobody would judge where replicas run on unlike hardware."""
        super().__pydantic_init_subclass__(**options)
        shares = cls.share is not Limit.share
        judges_all = cls.explain_whole_violation is not Limit.explain_whole_violation
        if not (shares or judges_all):
            raise TypeError(f"{cls.__name__} needs share, explain_whole_violation, or both")

    @property
    def is_repairable_by_moves(self) -> bool:
        """Whether moves of the search pay for it, and so every candidate keeps it."""
        return bool(self.penalties(1))

    def earliest_ns(self, frontier: Relaxation) -> int:
        """A time that no plan that keeps it undercuts, ns, by the relaxation."""
        return frontier.min_time_ns

    def safest_choice(self, problem: Problem) -> Rows | None:
        """The option indices, (N,), that keep it best, whatever they cost; None: unknown."""
        del problem
        return None

    def relieve(self, replay: Replay, context: LimitContext) -> Rows | None:
        """The option indices of a replay, (N,), changed a little where they break the limit.

        The search repeats it from several choices, where it finds no plan otherwise and the limit
        `can_relieve`. It may depend on where the replay comes closest to breaking the limit, but
        not on how strict the limit is.

        Returns:
            None where nothing can be changed.
        """
        del replay, context
        return None

    def share(self, kind: Relaxation, kinds: Sequence[Relaxation]) -> Self | None:
        """The limit that one kind of replica keeps, so that all together keep this one.

        Args:
            kind: the frontier of one kind.
            kinds: those of all kinds.

        Returns:
            None where the kinds together can be judged only (explain_whole_violation).
        """
        del kind, kinds
        return None

    # Words.

    @abstractmethod
    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        """How a replay breaks it, in words."""

    def explain_refusal(self, replay: Replay, context: LimitContext, frontier: Relaxation) -> str:
        """Why there is no plan, given the replay that came closest, with what can be had."""
        del frontier
        return self.explain_violation(replay, context)

    def explain_waiting(self, waiting_10uw: int) -> str | None:
        """How GPUs that only wait break it; None where they keep it.

        Args:
            waiting_10uw: what all GPUs draw while they wait, 10 uW.
        """
        del waiting_10uw
        return None

    def explain_whole_violation(self, job: WholeJob) -> str | None:
        """How all kinds of replicas together break it; None where they keep it."""
        del job
        return None

    def notes(self, replay: Replay, context: LimitContext) -> Iterator[str]:
        """Notes for people about a plan that keeps it."""
        del replay, context
        return iter(())

    def doubts(self, all_gpus: int) -> Iterator[str]:
        """Why it is probably not what was meant.

        Args:
            all_gpus: GPUs of all stages and replicas.
        """
        del all_gpus
        return iter(())

    # The proof.

    def prove(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        """The sentence that `envplan check` states of a plan that keeps it.

        Raises:
            InputError: the plan does not keep it.
        """
        if self.violation(replay, context):
            raise InputError(f"replayed, {self.explain_violation(replay, context)}")
        return self.explain_kept(stated, replay, context)

    @abstractmethod
    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        """That sentence."""

    def prove_ladder(self) -> str | None:
        """The sentence on a ladder whose plans all keep it; None where it is not about them."""
        return None


def as_float(value: Any) -> Any:
    """A number as a float; anything else as it is, for the model that checks it to refuse."""
    with suppress(TypeError, ValueError):
        return float(value)
    return value
