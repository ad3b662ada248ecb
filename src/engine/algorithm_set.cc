// SPDX-License-Identifier: Apache-2.0
#include "engine/algorithm_set.h"

#include <algorithm>

#include <fmt/format.h>

namespace spin::engine {
namespace {

// Instances beyond those of the start that are kept for the next request. One that falls out lives
// on in the requests that use it.
constexpr size_t kMaxInstances = 16;
// Those and the ones that only requests hold. Some have weights of their own, and how many requests
// wait must not decide how much memory that takes.
constexpr size_t kMaxLive = 32;

Status with_param(const Status& status) {
  return Status(status.code(), status.message(), "sparse");
}

// What a request asks for and cannot have is the request's fault, whatever the reason.
Status request_fault(const Status& status) {
  if (status.code() == StatusCode::kResourceExhausted) return with_param(status);
  return Status(StatusCode::kInvalidArgument, status.message(), "sparse");
}

Status refused(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message), "sparse");
}

// `start` with the options of `request` in place of its own; both name the same algorithm.
sparse::SparseSpec overlay(const sparse::SparseSpec& start, const sparse::SparseSpec& request) {
  sparse::SparseSpec merged = start;
  for (const auto& option : request.options) {
    const auto own = std::find_if(merged.options.begin(), merged.options.end(),
                                  [&](const auto& one) { return one.first == option.first; });
    if (own != merged.options.end()) {
      own->second = option.second;
    } else {
      merged.options.push_back(option);
    }
  }
  return merged;
}

std::string key_of(sparse::SparseSpec spec) {
  std::sort(spec.options.begin(), spec.options.end());
  std::string key = spec.name;
  for (const auto& [name, value] : spec.options) key += fmt::format(":{}={}", name, value);
  return key;
}

}  // namespace

Result<std::unique_ptr<backend::SideWeights>> StartedSideWeights::open(std::string_view location) {
  if (source_ == nullptr) {
    return Status(StatusCode::kNotFound, "there are no weights beside this model");
  }
  if (location.substr(0, backend::kBesideModel.size()) != backend::kBesideModel) {
    base::MutexLock lock(mutex_);
    const bool known = std::find(opened_.begin(), opened_.end(), location) != opened_.end();
    if (!known && frozen_) {
      return Status(StatusCode::kInvalidArgument,
                    "files are named when the server is started, not by a request");
    }
    if (!known) opened_.emplace_back(location);
  }
  return source_->open(location);
}

void StartedSideWeights::freeze() {
  base::MutexLock lock(mutex_);
  frozen_ = true;
}

AlgorithmSet::AlgorithmSet(const sparse::AlgorithmContext& context)
    : side_weights_(context.side_weights), context_(context) {
  context_.side_weights = &side_weights_;
}

Result<std::unique_ptr<AlgorithmSet>> AlgorithmSet::create(
    std::span<const std::string> specs, const sparse::AlgorithmContext& context) {
  std::unique_ptr<AlgorithmSet> set(new AlgorithmSet(context));
  for (const std::string& text : specs) {
    auto spec = sparse::parse_sparse_spec(text);
    if (!spec.ok()) return with_param(spec.status());
    if (set->find(spec->name) != nullptr) {
      return refused(fmt::format("the sparse algorithm {} is given twice", spec->name));
    }
    Started one;
    one.spec = std::move(*spec);
    if (one.spec.name != "dense") {
      auto made = sparse::create_algorithm(one.spec, set->context_);
      if (!made.ok()) return with_param(made.status());
      one.algorithm = std::move(*made);
    } else if (!one.spec.options.empty()) {
      return refused("dense attention has no options");
    }
    set->started_.push_back(std::move(one));
  }
  if (!set->started_.empty()) set->default_ = set->started_.front().algorithm;
  set->side_weights_.freeze();
  return set;
}

const AlgorithmSet::Started* AlgorithmSet::find(const std::string& name) const {
  for (const Started& one : started_) {
    if (one.spec.name == name) return &one;
  }
  return nullptr;
}

std::string AlgorithmSet::known_names() const {
  std::string names = find("dense") == nullptr ? "dense" : "";
  for (const Started& one : started_) {
    names += (names.empty() ? "" : ", ") + one.spec.name;
  }
  return names;
}

Result<AlgorithmRef> AlgorithmSet::resolve(const std::optional<std::string>& text) {
  if (!text) return default_;
  auto parsed = sparse::parse_sparse_spec(*text);
  if (!parsed.ok()) return request_fault(parsed.status());
  const Started* start = find(parsed->name);
  if (parsed->name == "dense") {
    if (!parsed->options.empty()) return refused("dense attention has no options");
    return AlgorithmRef();
  }
  if (start == nullptr) {
    return refused(
        fmt::format("this server was not started with the sparse algorithm {}; it has {}",
                    parsed->name, known_names()));
  }
  const sparse::SparseSpec spec = overlay(start->spec, *parsed);
  const std::string key = key_of(spec);
  if (key == key_of(start->spec)) return start->algorithm;
  base::MutexLock lock(mutex_);
  const auto same =
      std::find_if(made_.begin(), made_.end(), [&](const Made& one) { return one.key == key; });
  if (same != made_.end()) {
    std::rotate(same, same + 1, made_.end());
    return made_.back().algorithm;
  }
  if (made_.size() >= kMaxInstances) made_.erase(made_.begin());
  std::erase_if(live_, [](const auto& one) { return one.expired(); });
  if (live_.size() >= kMaxLive) {
    return Status(
        StatusCode::kResourceExhausted,
        fmt::format("requests with {} different settings of sparse attention are at work, "
                    "more settings have to wait until some of them have ended",
                    kMaxLive),
        "sparse");
  }
  auto made = sparse::create_algorithm(spec, context_);
  if (!made.ok()) return request_fault(made.status());
  made_.push_back({key, std::move(*made)});
  live_.push_back(made_.back().algorithm);
  return made_.back().algorithm;
}

std::vector<std::string> AlgorithmSet::describe() const {
  std::vector<std::string> texts;
  for (const Started& one : started_) {
    if (one.algorithm == nullptr) {
      texts.push_back(one.spec.name);
      continue;
    }
    const std::string& settings = one.algorithm->descriptor().settings;
    texts.push_back(settings.empty() ? one.spec.name : one.spec.name + ":" + settings);
  }
  return texts;
}

std::vector<AlgorithmRef> AlgorithmSet::started() const {
  std::vector<AlgorithmRef> list;
  for (const Started& one : started_) {
    if (one.algorithm != nullptr) list.push_back(one.algorithm);
  }
  return list;
}

}  // namespace spin::engine
