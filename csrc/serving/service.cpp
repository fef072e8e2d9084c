#include "service.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "../types.hpp"

namespace envplan::serving {
namespace {

constexpr double kAsQuick = 1.1;  // times the time of a prompt's token: makes no difference

}  // namespace

Service::Service(Requests requests, std::vector<Tables> tables, std::vector<Size> sizes,
                 std::vector<Slo> slos, std::vector<double> usual_output, double max_context)
    : requests(requests),
      tables(std::move(tables)),
      sizes(std::move(sizes)),
      slos(std::move(slos)),
      usual_output(std::move(usual_output)),
      max_context(max_context) {
  check();
  rank_classes();
  for (const Size& size : this->sizes) limits.push_back(limits_of(size));
}

void Service::check() const {
  require(!slos.empty() && slos.size() <= kMaxClasses, "there must be one to 64 classes");
  require(usual_output.size() == slos.size(), "each class needs a usual output");
  for (const double tokens : usual_output) require(tokens >= 0, "tokens must not be negative");
  require(max_context > 0, "the longest context must be positive");
  require(requests.count > 0, "requests must be there");
  for (int64_t k = 0; k < requests.count; ++k) {
    require(std::isfinite(requests.arrival[k]), "an arrival is no number");
    require(k == 0 || requests.arrival[k - 1] <= requests.arrival[k], "arrivals must ascend");
    require(requests.input[k] >= 0 && requests.output[k] >= 0, "tokens must not be negative");
    require(requests.expected == nullptr || requests.expected[k] >= 0,
            "expected tokens must not be negative");
    require(requests.known[k] < slos.size() && requests.taken[k] < slos.size(),
            "a request has no class");
  }
  for (const Tables& table : tables) {
    require(table.step_s.size() >= 2 && table.step_s.size() == table.step_w.size(),
            "steps need two times and powers at least");
    require(table.prompt_s.size() >= 2 && table.prompt_s.size() == table.prompt_w.size(),
            "prompts need two times and powers at least");
    require(table.grid > 0, "the grid of prompts must be positive");
    for (const double step : table.step_s) require(step > 0, "a step must take time");
    require(table.context_s >= 0 && table.context_w >= 0, "contexts must not speed steps up");
  }
  for (const Size& size : sizes) {
    require(size.link_bytes_s > 0, "a link must carry something");
    require(size.chunk >= 1 && size.chunk <= kMostChunk,
            "a chunk must have between 1 and 1048576 tokens");
    require(!size.tables.empty(), "a size needs a configuration");
    for (const int32_t k : size.tables) {
      require(k >= 0 && static_cast<std::size_t>(k) < tables.size(),
              "a size names no configuration");
    }
  }
}

void Service::rank_classes() {
  std::vector<double> ttft_s;
  for (const Slo& slo : slos) ttft_s.push_back(slo.ttft_s);
  std::sort(ttft_s.begin(), ttft_s.end());
  ttft_s.erase(std::unique(ttft_s.begin(), ttft_s.end()), ttft_s.end());
  for (const Slo& slo : slos) {
    const auto level = std::lower_bound(ttft_s.begin(), ttft_s.end(), slo.ttft_s) - ttft_s.begin();
    levels.push_back(static_cast<int32_t>(level));
  }
  num_levels = static_cast<int32_t>(ttft_s.size());
}

SizeLimits Service::limits_of(const Size& size) const {
  double tbt = slos.front().tbt_s;
  for (const Slo& slo : slos) tbt = std::min(tbt, slo.tbt_s);
  const Tables& table = tables[size.tables.back()];
  SizeLimits found;
  found.shared_chunk = max_chunk_tokens(size, table, kTbtShare * tbt);
  const double quick = kAsQuick * table.prompt_time(found.shared_chunk) / found.shared_chunk;
  for (const double step_s : table.step_s) {
    const int32_t tokens =
        max_chunk_tokens(size, table, kTbtShare * tbt - (step_s - table.step_s[1]));
    const bool slower = table.prompt_time(tokens) / tokens > quick;
    found.chunk_beside.push_back(slower ? tokens : found.shared_chunk);
  }
  for (const Slo& slo : slos) {
    found.most_batch.push_back(batch_beside(table, kLeastChunk, slo.tbt_s));
    std::size_t batch = table.largest_batch();
    while (batch > 1 && table.step_s[batch] > kTbtShare * slo.tbt_s) --batch;
    found.most_decoding.push_back(batch);
  }
  return found;
}

std::size_t Service::batch_beside(const Tables& table, int32_t tokens, double tbt,
                                  double context) const {
  double most = kTbtShare * tbt;
  // Where an iteration with prompts is too long whatever the batch is, only the steps count.
  if (table.prompt_time(tokens) < most) most += table.step_s[1] - table.prompt_time(tokens);
  std::size_t batch = table.largest_batch();
  const double context_s = table.context_s * context;
  while (batch > 1 && table.step_s[batch] + context_s * static_cast<double>(batch) > most) --batch;
  return batch;
}

double Service::own_time(const Size& size, const Tables& table, double tokens) const {
  return std::max(table.prompt_time(tokens), tokens / size.chunk * table.prompt_time(size.chunk));
}

int32_t Service::max_chunk_tokens(const Size& size, const Tables& table, double most) const {
  int32_t tokens = size.chunk;
  while (tokens > kLeastChunk && table.prompt_time(tokens) > most) tokens -= kLeastChunk;
  return tokens;
}

std::vector<int64_t> Service::counts(double begin, double end) const {
  std::vector<int64_t> found(slos.size());
  const double* last = requests.arrival + requests.count;
  const auto from = std::lower_bound(requests.arrival, last, begin) - requests.arrival;
  const auto to = std::lower_bound(requests.arrival, last, end) - requests.arrival;
  for (auto k = from; k < to; ++k) found[requests.taken[k]] += !is_too_long(k);
  return found;
}

}  // namespace envplan::serving
