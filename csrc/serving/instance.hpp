// One instance: what it does now, what waits, and what it decodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
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

// Tokens of an instance's memory. What is used must not exceed what there is. For requests inside,
// memory is kept for outputs as long as expected; those that get longer use more than that.
struct Memory {
  double reserved = 0;  // for the requests inside: those that decode or whose prompts have begun
  double claimed = 0;   // the same, and for those that wait
  double prompts = 0;   // used by prompts that have begun, and by contexts that come or go
};

// A request whose prompt ran on another instance, on its way to the one that decodes it.
struct Handover {
  Prompt prompt;  // all of it is through; its `reserve` is that of the instance where it ran
  int32_t from;
  double reserve_here = 0;  // tokens of memory that are kept for it at its destination
};

// A prompt that was through when no instance decoded.
struct Unplaced {
  Prompt prompt;
  int32_t from, pool;  // the instance where it ran, and where it is to decode
};

struct Link {
  double bytes_s = 1e300;  // > 0
  double free = 0;         // when it is through with what has been put on it, s
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
  int32_t waiting = 0;  // prompts in `prompts`
  std::vector<Piece> pieces;
  Batch batch;
  std::vector<int32_t> decoding_of_class;  // requests in `batch`

  std::deque<Handover> handovers;  // that wait for memory here
  std::vector<Handover> arrived;   // whose contexts are here; they decode from the next step on
  int32_t coming = 0, going = 0;   // transfers to and from here
  Link sends, receives;            // contexts

  // Tokens in memory now, with those that the next step reads.
  double used() const { return memory.prompts + batch.context(); }
  // Requests that decode here, or will.
  std::size_t decoding() const {
    return batch.size() + arrived.size() + handovers.size() + static_cast<std::size_t>(coming);
  }
  bool is_empty() const {
    return batch.empty() && prompts->empty() && pieces.empty() && handovers.empty() &&
           arrived.empty() && coming == 0 && going == 0;
  }
};

}  // namespace envplan::serving
