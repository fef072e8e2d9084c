// The whole test framework: a check that names itself, and a count of those that failed.
#pragma once

#include <cstdio>

namespace envplan::test {

inline int failures = 0;

inline void check(bool ok, const char* what, const char* test, int line) {
  if (ok) return;
  ++failures;
  std::printf("FAILED %s (line %d): %s\n", test, line, what);
}

// What main returns.
inline int summary(const char* program) {
  std::printf("%s: %s\n", program, failures == 0 ? "all checks hold" : "FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace envplan::test

#define CHECK(condition) ::envplan::test::check((condition), #condition, __func__, __LINE__)
