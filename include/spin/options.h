// SPDX-License-Identifier: Apache-2.0
// How an engine is started. Plain structs; the command line's flags and their help are made from
// them (cli/). Thread: plain data.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace spin {

enum class DTypeChoice : uint8_t {
  kAuto,  // bf16 where the processor multiplies it in hardware, else fp32
  kFloat32,
  kBFloat16,
};

// Where EngineOptions::gpu_memory_utilization is not given.
inline constexpr double kDefaultGpuMemoryUtilization = 0.9;

struct EngineOptions {
  // A checkpoint directory (config.json + safetensors + tokenizer.json), a .gguf file or a
  // .safetensors file beside its config.json.
  std::string model;
  // Directory or file to take the tokenizer from; empty: from the model.
  std::string tokenizer;
  // Name shown by the API; empty: the last component of `model`.
  std::string served_model_name;
  DTypeChoice dtype = DTypeChoice::kAuto;
  // "auto" (by the checkpoint's template), "none", "chatml", "smollm2", "qwen2.5", "qwen3",
  // "llama3", "llama3.1".
  std::string chat_format = "auto";
  // "cpu", "cuda" or "cuda:N" (spin/device_name.h). "cuda" needs a build with SPIN_CUDA.
  std::string device = "cpu";
  // Threads of compute on the CPU; 0: all usable cores. Without effect on other devices.
  uint32_t threads = 0;
  // Longest prompt + output in tokens; 0: the model's own limit, or what the KV memory holds if
  // that is less.
  uint64_t max_model_len = 0;
  // Requests in the running set (choices count singly). More: higher throughput, longer steps.
  uint32_t max_num_seqs = 64;
  // Tokens in one step, prefill chunks and decodes together. More: faster prefill, longer pauses
  // of the running requests.
  uint32_t max_num_batched_tokens = 512;
  // false: a prompt is processed in one step, and must fit max_num_batched_tokens.
  bool enable_chunked_prefill = true;
  // Bytes of KV cache in fast memory, the slots of its fast tier; 0: what max_num_seqs requests of
  // max_model_len need under that algorithm of `sparse` that needs the most pages, at most 60 % of
  // the memory left after the weights.
  uint64_t kv_cache_memory_bytes = 0;
  // Share of a GPU's memory, in (0, 1], that weights, workspace, KV cache and index may take
  // together; none: 0.9. Only for devices with memory of their own.
  std::optional<double> gpu_memory_utilization;
  // Bytes of the KV cache's host tier, to which pages of sparse requests are offloaded; 0: there is
  // none, and every request stays in fast memory.
  uint64_t host_memory_bytes = 0;
  // Fast pages of a sparse request beyond those that a step needs, as a multiple of these; none:
  // as many as there is room for, shared out by what they save.
  std::optional<double> kv_buffer_ratio;
  // Sparse attention that requests may use, "NAME[:key=value,...]"; the first is the default,
  // "dense" is none. Empty: all requests are dense.
  std::vector<std::string> sparse;
  // File to which the pages are recorded that sparse requests select in every step, for studies of
  // locality (docs/testing.md); "": none. An existing file is replaced.
  std::string selection_trace;
  // Tokens of one page (8, 16, 32 or 64).
  uint32_t page_tokens = 8;
  // Requests waiting beyond the running set; more are refused (HTTP 429).
  uint32_t max_queued_requests = 1024;
  // Seed of requests that bring none; none: from the system's entropy.
  std::optional<uint64_t> seed;
  // Sampling defaults from generation_config.json ("auto") or the neutral ones ("vllm").
  std::string generation_config = "auto";
};

// Loading progress in [0, 1] with the part at work ("weights"). Called on the loading thread;
// returning false cancels the load.
using LoadProgress = std::function<bool(double fraction, std::string_view part)>;

}  // namespace spin
