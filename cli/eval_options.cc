// SPDX-License-Identifier: Apache-2.0
#include "cli/eval_options.h"

#include <fmt/format.h>

#include "cli/device_flags.h"

namespace spin::cli {
namespace {

struct Row {
  Evaluation kind;
  std::string_view name;
  const char* usage;
  const char* about;
};

constexpr Row kRows[] = {
    {Evaluation::kRuler, "ruler", "--model PATH --data FILE [OPTIONS]",
     "Counts the answers that sparse attention gets right, beside dense attention: exact match per "
     "task, attended tokens, hits of the fast tier, bytes fetched. Every answer is given token by "
     "token; it is right if each of its tokens was the likeliest."},
    {Evaluation::kPerplexity, "ppl", "--model PATH --text FILE [OPTIONS]",
     "Perplexity of a text whose last tokens of each window are decoded with sparse attention, "
     "beside dense attention."},
    {Evaluation::kAgreement, "agreement", "--model PATH --text FILE [OPTIONS]",
     "How often sparse attention's likeliest token is that of dense attention, and the divergence "
     "of its predictions, over the last tokens of each window of a text."},
};

const Row& row_of(Evaluation kind) { return kRows[static_cast<size_t>(kind)]; }

void add_model_flags(FlagTable& table, EvaluationOptions& options) {
  table.add_text({"model", "PATH",
                  "The checkpoint: a directory with config.json and safetensors files, a .gguf "
                  "file, or a .safetensors file beside its config.json"},
                 options.model, {1, 4095});
  table.make_required();
  table.add_text(
      {"tokenizer", "PATH", "Directory or file to take the tokenizer from", "the model's own"},
      options.tokenizer, {1, 4095});
  table.add_choice({"dtype", "TYPE",
                    "Type of the weights in memory, of their products and of the KV cache; auto "
                    "takes bfloat16 where the processor multiplies it in hardware, else float32"},
                   {"auto", "float32", "bfloat16"}, "auto",
                   [&options](size_t index) { options.dtype = static_cast<DTypeChoice>(index); });
  add_device_flags(table, options.device, options.threads);
  table.add_count({"max-num-batched-tokens", "TOKENS", "Tokens of one step of the prefill"},
                  options.max_num_batched_tokens, {1, 1u << 20});
  table.add_count({"max-num-seqs", "N",
                   "Settings that decode together, where memory holds so many; fewer take less "
                   "memory and give the same results"},
                  options.max_num_seqs, {1, 4096});
  table.add_choice({"block-size", "TOKENS", "Tokens of one page of the KV cache"},
                   {"8", "16", "32", "64"}, fmt::to_string(options.page_tokens),
                   [&options](size_t index) { options.page_tokens = 8u << index; });
}

void add_setting_flags(FlagTable& table, EvaluationOptions& options) {
  table.group("Settings");
  table.add_texts({"sparse", "NAME[:K=V,...]",
                   "Sparse attention to compare with dense attention, with its options; as often "
                   "as there are settings. Names and options are in docs/algorithms",
                   "dense attention alone"},
                  options.sparse, {1, 1024, 256});
  table.add_real({"fast-fraction", "X",
                  "Slots in fast memory that each setting gets, as a share of all pages of a "
                  "prompt; never fewer than a step needs. The other pages lie in host memory"},
                 options.fast_fraction, {0, 1});
}

}  // namespace

std::optional<Evaluation> evaluation_named(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.kind;
  }
  return std::nullopt;
}

std::string_view evaluation_name(Evaluation kind) { return row_of(kind).name; }

FlagTable eval_flags(EvalOptions& options) {
  const Row& row = row_of(options.kind);
  FlagTable table(fmt::format("eval {}", row.name), row.usage, row.about);
  add_model_flags(table, options.evaluation);
  if (options.kind == Evaluation::kRuler) {
    table.group("Prompts");
    table.add_text({"data", "FILE",
                    "One JSON object per line with \"task\", \"prompt\", \"answer\" and, as ids "
                    "of the model's vocabulary, \"answer_ids\""},
                   options.ruler.data, {1, 4095});
    table.make_required();
    table.add_count({"limit-per-task", "N", "First prompts of each task to take; 0 takes all"},
                    options.ruler.limit_per_task, {0, 1u << 30});
  } else {
    table.group("Text");
    table.add_text({"text", "FILE", "The text, UTF-8"}, options.text.text, {1, 4095});
    table.make_required();
    table.add_count({"window-tokens", "TOKENS", "Length of a window"}, options.text.window_tokens,
                    {3, 1ull << 27});
    table.add_count({"positions", "N", "Last tokens of each window, which are decoded"},
                    options.text.positions, {1, 1u << 20});
    table.add_count({"windows", "N", "Windows at most"}, options.text.windows, {1, 1u << 30});
  }
  add_setting_flags(table, options.evaluation);
  table.group("Output");
  table.add_text({"json", "FILE", "Writes the results to this file as one JSON object", "none"},
                 options.json, {1, 4095});
  return table;
}

std::string eval_help() {
  return "Usage: spin eval KIND [OPTIONS]\n"
         "\n"
         "Compares sparse attention with dense attention. One dense prefill of a prompt\n"
         "serves all settings, which then decode the same tokens.\n"
         "\n"
         "Kinds:\n"
         "  ruler       answers to prompts that hide facts in long contexts\n"
         "  ppl         perplexity of a text\n"
         "  agreement   likeliest tokens and divergence on a text\n"
         "\n"
         "Options:\n"
         "  -h, --help   prints this text; 'spin eval KIND --help' that of a kind\n";
}

}  // namespace spin::cli
