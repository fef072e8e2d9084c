// The requests that an instance decodes, and how they get on.
//
// Every step gives each of them one token. A step reads the context of all of them: with B requests
// whose contexts have S tokens in all, it takes step_s + context_s * S, and S is B more at the next
// one. So n steps take n * step_s + context_s * (n * S + B * n (n - 1) / 2), and how far a batch
// is after some time is the root of a quadratic: no step need be looked at by itself. Within a step
// progress is a fraction; between whole numbers it follows the same parabola.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "performance.hpp"

namespace envplan::serving {

struct Decoding {
  double leaves;       // progress of the batch at its last token
  double first_token;  // when that came, s
  double offset;       // tokens of its context, less the batch's progress
  double reserve;      // tokens of memory that are kept for it
  int64_t order;       // rises with each request that comes in
  int32_t request;
};

class Batch {
 public:
  bool empty() const { return requests_.empty(); }
  std::size_t size() const { return requests_.size(); }
  double progress() const { return progress_; }
  // The request that leaves first.
  const Decoding& front() const { return requests_.front(); }
  const std::vector<Decoding>& requests() const { return requests_; }

  // A request comes in: its first token came at `first_token`, it has so many tokens of context and
  // as many steps to go, and so much memory is kept for it. Progress must be whole.
  void add(int32_t request, double first_token, double context, double steps, double reserve);
  // Takes out the request that leaves first.
  Decoding pop();
  // Takes out the request that came in last. Takes time by the batch.
  Decoding pop_latest();

  // Tokens of context that the next step reads.
  double context() const { return offsets_ + progress_ * static_cast<double>(size()); }

  // From now on steps take what a configuration's tables say of this batch.
  void set_pace(const Tables& table);
  double step_w() const { return step_w_; }
  double context_w() const { return context_w_; }
  double step_s() const { return step_s_; }
  // Time of the reading of all contexts in the next step, s.
  double context_time(const Tables& table) const { return table.context_s * context(); }

  // How long so many steps take from here, s.
  double duration(double steps) const { return steps * (speed() + 0.5 * growth() * steps); }
  // How many steps, not whole, so many seconds are from here.
  double steps_in(double seconds) const {
    const double v = speed();
    return 2 * seconds / (v + std::sqrt(v * v + 2 * growth() * seconds));
  }
  // How long it is from so many seconds after now to the end of the step that runs then, s.
  double rest_of_step(double seconds) const;
  void advance(double steps) { progress_ += steps; }
  // At the end of a step: events lie on whole tokens.
  void round_progress() { progress_ = std::round(progress_); }

 private:
  double growth() const { return context_s_ * static_cast<double>(size()); }
  double speed() const { return step_s_ + context_s_ * context() - 0.5 * growth(); }

  std::vector<Decoding> requests_;  // heap, first to leave first
  int64_t added_ = 0;
  double progress_ = 0;  // steps since the beginning
  double offsets_ = 0;   // sum of theirs
  double step_s_ = 1, step_w_ = 0, context_s_ = 0, context_w_ = 0;
};

}  // namespace envplan::serving
