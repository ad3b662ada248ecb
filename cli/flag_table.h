// SPDX-License-Identifier: Apache-2.0
// The flags of one subcommand, each declared once: its parser with the range, its environment
// variable, its default (read from the struct it fills) and its help text all come from that one
// declaration. CLI11 splits the command line; everything else is here.
//
// A value comes from the command line, else from the environment (SPIN_ + the flag in upper case
// with '_' for '-'), else from the struct. An empty environment variable counts as unset.
// Thread: external synchronisation. Lifetime: the targets outlive the table.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spin/status.h"

namespace spin::cli {

// Looks up an environment variable; null when it is not set.
using Environment = std::function<const char*(const char* name)>;

// How a flag appears in the help: `--name VALUE`, then `text`. `text` ends without a full stop;
// range, default and environment variable are added. `unset` says what happens without the flag
// where the target has no value of its own.
struct FlagHelp {
  std::string_view name;   // "port" for --port
  std::string_view value;  // "N"; empty for switches
  std::string_view text;
  std::string_view unset = {};
};

struct CountRange {
  uint64_t min = 0;
  uint64_t max = std::numeric_limits<uint64_t>::max();
};

struct RealRange {
  double min = 0;
  double max = 0;
  bool open_min = false;  // (min, max] instead of [min, max]
};

struct TextRule {
  size_t min_bytes = 0;
  size_t max_bytes = 1u << 20;
  size_t max_count = 1;    // of a repeatable flag
  bool in_header = false;  // printable ASCII without spaces, as a header field can carry it
};

class FlagTable {
 public:
  // `usage` follows "spin COMMAND"; `about` is the paragraph under it.
  FlagTable(std::string command, std::string usage, std::string about);

  // Flags declared from now on are listed under `title`.
  void group(std::string title);

  // Integers; 'k', 'm', 'g', 't' multiply by powers of 1000, 'K', 'M', 'G', 'T' by powers of 1024.
  void add_count(const FlagHelp& help, uint32_t& target, CountRange range);
  void add_count(const FlagHelp& help, uint64_t& target, CountRange range);
  void add_count(const FlagHelp& help, std::optional<uint64_t>& target, CountRange range);
  // An integer that may be negative, without a unit.
  void add_signed(const FlagHelp& help, std::optional<int64_t>& target, int64_t min, int64_t max);
  void add_real(const FlagHelp& help, double& target, RealRange range);
  void add_real(const FlagHelp& help, std::optional<float>& target, RealRange range);
  void add_real(const FlagHelp& help, std::optional<double>& target, RealRange range);
  // --name and --no-name; in the environment 1, 0, true or false.
  void add_switch(const FlagHelp& help, bool& target);
  void add_switch(const FlagHelp& help, std::optional<bool>& target);
  // One of `choices`; `set` gets the index.
  void add_choice(const FlagHelp& help,
                  std::vector<std::string> choices,
                  std::string default_choice,
                  std::function<void(size_t)> set);
  void add_text(const FlagHelp& help, std::string& target, TextRule rule);
  void add_text(const FlagHelp& help, std::optional<std::string>& target, TextRule rule);
  // Repeatable; the environment gives one value.
  void add_texts(const FlagHelp& help, std::vector<std::string>& target, TextRule rule);
  // Repeatable, with a parser of its own: `set` returns "" or what was expected.
  void add_parsed(const FlagHelp& help,
                  std::string range,
                  std::function<std::string(std::string_view)> set);

  // As add_parsed(), given once.
  void add_one(const FlagHelp& help,
               std::string range,
               std::function<std::string(std::string_view)> set);

  // The last flag added: may also be written as the positional argument NAME (in capitals).
  void also_positional(std::string name);
  // The last flag added, which is no switch: may also be written --name. (The environment knows its
  // first name alone.)
  void also_named(std::string name);
  // The last flag added: must be given.
  void make_required();
  // The last flag added: an empty environment variable is an error instead of unset.
  void refuse_empty_environment();

  // Errors: kInvalidArgument, with a message that names the flag (or variable), what was expected
  // and what was found. kCancelled when --help was asked for: nothing is wrong, print help().
  Status parse(std::span<const std::string> args, const Environment& environment);

  // Wrapped to 80 columns, ends with a newline.
  std::string help() const;

  // "--port", "--no-stream", ...: every flag in order, switches in both spellings.
  std::vector<std::string> flag_names() const;

 private:
  struct Flag {
    std::string name;
    std::string value;
    std::string text;  // with range and default
    std::string group;
    std::string environment;
    std::string positional;
    std::string alias;
    bool is_switch = false;
    bool repeatable = false;
    bool required = false;
    bool refuse_empty = false;
    bool given = false;
    std::function<std::string(std::string_view)> set;  // "" or what was expected
  };

  Flag& add(const FlagHelp& help, std::string notes);
  Status parse_arguments(std::span<const std::string> args);
  Status parse_environment(const Environment& environment);

  std::string command_;
  std::string usage_;
  std::string about_;
  std::string group_ = "Options";
  std::vector<Flag> flags_;
};

// "SPIN_MAX_MODEL_LEN" for "max-model-len".
std::string environment_name(std::string_view flag);

// `text` in lines of at most `width` columns, each after `indent` spaces; breaks at spaces only.
std::string wrap_text(std::string_view text, size_t indent, size_t width);

}  // namespace spin::cli
