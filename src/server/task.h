// SPDX-License-Identifier: Apache-2.0
// A callable that runs once and may own move-only things (std::function cannot).
// Thread: external synchronisation.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace spin::server {

class Task {
 public:
  Task() = default;
  template <typename F>
  requires(!std::is_same_v<std::decay_t<F>, Task>)
      Task(F&& function)  // NOLINT(google-explicit-constructor): reads like std::function
      : body_(std::make_unique<Body<std::decay_t<F>>>(std::forward<F>(function))) {}

  explicit operator bool() const { return body_ != nullptr; }
  // Requires: holds a callable.
  void operator()() { body_->run(); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual void run() = 0;
  };
  template <typename F>
  struct Body final : Base {
    explicit Body(F f) : function(std::move(f)) {}
    void run() override { function(); }
    F function;
  };
  std::unique_ptr<Base> body_;
};

}  // namespace spin::server
