// SPDX-License-Identifier: Apache-2.0
#include "cli/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace spin::cli {

void set_up_logging(LogLevel level) {
  spdlog::level::level_enum least = spdlog::level::info;
  switch (level) {
    case LogLevel::kDebug:
      least = spdlog::level::debug;
      break;
    case LogLevel::kInfo:
      least = spdlog::level::info;
      break;
    case LogLevel::kWarning:
      least = spdlog::level::warn;
      break;
    case LogLevel::kError:
      least = spdlog::level::err;
      break;
  }
  auto logger = spdlog::stderr_logger_mt("spin");
  logger->set_level(least);
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace spin::cli
