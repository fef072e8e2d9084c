// One instance: what it does now, what waits, and what it decodes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "batch.hpp"
#include "scheduler.hpp"

namespace envplan::serving {

// What an instance does until `next`.
enum class Phase : uint8_t { kStarting, kIdle, kStepping, kPrompts, kGone };

struct Piece {  // of a prompt, in the running iteration
  Prompt prompt;
  int32_t tokens;
};

// Tokens of an instance's memory.
struct Memory {
  double reserved = 0;  // for the requests inside: those that decode or whose prompts have begun
  double claimed = 0;   // the same, and for those that wait
};

struct Instance {
  int32_t pool = 0, size = 0, clock = 0, preferred = 0, version = 0;
  bool managed = false, leaving = false;
  Phase phase = Phase::kStarting;
  double since = 0, next = 0, watts = 0;
  Memory memory;
  double asked_at = -1e9;      // when its clock was last asked to change
  int32_t asked_clock = 0;     // what was asked for
  std::vector<double> queued;  // prompt tokens that wait, by level
  std::unique_ptr<PromptQueue> prompts;
  Batch batch;
  std::vector<Piece> pieces;
  int32_t waiting = 0;  // prompts in `prompts`
};

}  // namespace envplan::serving
