// What is served, by which instances, within which SLOs.
//
// Thread safety. A Service never changes, so threads may share one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "performance.hpp"
#include "requests.hpp"

namespace envplan::serving {

constexpr double kNever = 1e300;         // s
constexpr double kTbtShare = 0.8;        // of the SLO that a batch may take between two tokens
constexpr int32_t kLeastChunk = 128;     // prompt tokens of an iteration, at least
constexpr int32_t kMostChunk = 1 << 20;  // and at most: limits are found by going through them

// What a stretch of requests asks of one instance size.
struct Need {
  double instances;  // that it needs, not rounded
  double busy;       // instances that prompts keep busy, on average
  double decoding;   // requests that decode at a time, on average
  double hopeless;   // share of requests whose prompts alone take longer than their SLOs
};

// What the SLOs allow an instance size at its highest clock.
struct SizeLimits {
  int32_t shared_chunk;                 // prompt tokens of an iteration with a small batch
  std::vector<int32_t> chunk_beside;    // the same, by batch, where fewer make prompts slower
  std::vector<std::size_t> most_batch;  // that an iteration with prompts keeps a class's TBT SLO of
  std::vector<std::size_t> most_decoding;  // the same without prompts
};

struct Service {
  Requests requests;
  std::vector<Tables> tables;
  std::vector<Size> sizes;
  std::vector<Slo> slos;             // of each class, at most kMaxClasses
  std::vector<double> usual_output;  // tokens of each class, as far as is known beforehand
  double max_context;  // tokens: the model takes no longer requests, which are not served at all
  std::vector<SizeLimits> limits;  // of each size
  std::vector<int32_t> levels;     // of each class: how strict its TTFT SLO is, 0 the strictest
  int32_t num_levels;

  // Copies all but the requests' arrays. Throws std::invalid_argument where anything contradicts
  // the contracts of its parts.
  Service(Requests requests, std::vector<Tables> tables, std::vector<Size> sizes,
          std::vector<Slo> slos, std::vector<double> usual_output, double max_context = kNever);

  // Whether a request is longer than the model takes.
  bool is_too_long(int64_t request) const { return requests.context(request) > max_context; }

  // Requests by the class they are taken for that arrive in [begin, end), s, without those that
  // are too long.
  std::vector<int64_t> counts(double begin, double end) const;

  // What the requests of [begin, end) need of a size at its highest clock: those that are taken
  // for one of `classes` (bit k: class k). instances is the least number at which no more than a
  // share `late` of them waits too long. Work (s of one instance) arrives in bins of a tenth of a
  // second and is done by all instances together, stricter SLOs first; a request waits too long if
  // the work that goes before it takes longer than its SLO leaves. Contexts must fit, too. Requests
  // that are late in any case are work like others, and are not counted as late; those that the
  // size cannot hold are no work, and hopeless. Those that are too long do not count.
  Need required_instances(double begin, double end, uint64_t classes, int32_t size,
                          double late) const;

  // Tables of a size at its highest clock.
  const Tables& fastest(int32_t size) const { return tables[sizes[size].tables.back()]; }

  // The largest batch that, beside so many prompt tokens in each iteration, keeps a TBT SLO, if
  // each request has so many tokens of context.
  std::size_t batch_beside(const Tables& table, int32_t tokens, double tbt,
                           double context = 0) const;

  // A prompt alone in an instance, s.
  double own_time(const Size& size, const Tables& table, double tokens) const;

  // Prompt tokens of an iteration: as many as take no more than `most`, s.
  int32_t max_chunk_tokens(const Size& size, const Tables& table, double most) const;

 private:
  void check() const;
  void rank_classes();
  SizeLimits limits_of(const Size& size) const;
};

}  // namespace envplan::serving
