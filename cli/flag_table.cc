// SPDX-License-Identifier: Apache-2.0
#include "cli/flag_table.h"

#include <algorithm>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/parse_number.h"
#include "base/quote.h"

namespace spin::cli {
namespace {

constexpr size_t kHelpWidth = 80;
constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

std::string range_text(CountRange range) {
  if (range.max == kUnlimited) {
    return range.min == 0 ? "an integer" : fmt::format("an integer of at least {}", range.min);
  }
  return fmt::format("an integer from {} to {}", range.min, range.max);
}

std::string range_text(RealRange range) {
  return range.open_min ? fmt::format("a number above {} and up to {}", range.min, range.max)
                        : fmt::format("a number from {} to {}", range.min, range.max);
}

std::string default_text(std::string_view value) { return fmt::format("Default: {}.", value); }

std::string notes(std::string_view range, std::string_view default_note) {
  return fmt::format("Range: {}. {}", range, default_note);
}

// Nothing when `text` is no count inside `range`.
std::optional<uint64_t> parse_count(std::string_view text, CountRange range) {
  const std::optional<uint64_t> value = base::parse_size(text);
  if (!value || *value < range.min || *value > range.max) return std::nullopt;
  return value;
}

std::optional<double> parse_real(std::string_view text, RealRange range) {
  const std::optional<double> value = base::parse_double(text);
  if (!value || *value > range.max) return std::nullopt;
  if (range.open_min ? *value <= range.min : *value < range.min) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_signed(std::string_view text, int64_t min, int64_t max) {
  const bool negative = !text.empty() && text.front() == '-';
  const std::optional<uint64_t> size = base::parse_decimal(negative ? text.substr(1) : text);
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (!size || *size > kMost) return std::nullopt;
  const int64_t value = negative ? -static_cast<int64_t>(*size) : static_cast<int64_t>(*size);
  if (value < min || value > max) return std::nullopt;
  return value;
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "1" || text == "true") return true;
  if (text == "0" || text == "false") return false;
  return std::nullopt;
}

template <typename T, typename Parse>
std::function<std::string(std::string_view)> setter(T& target, std::string expected, Parse parse) {
  return [&target, expected = std::move(expected), parse](std::string_view text) -> std::string {
    const auto value = parse(text);
    if (!value) return expected;
    target = static_cast<std::decay_t<decltype(*value)>>(*value);
    return "";
  };
}

std::string text_range(TextRule rule) {
  return fmt::format("text of {} to {} {}", rule.min_bytes, rule.max_bytes,
                     rule.in_header ? "printable ASCII characters without spaces" : "bytes");
}

bool fits(std::string_view text, TextRule rule) {
  if (text.size() < rule.min_bytes || text.size() > rule.max_bytes) return false;
  return !rule.in_header ||
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < '\x7F'; });
}

std::string found(std::string_view expected, std::string_view text) {
  return fmt::format("expected {}, found {}", expected, base::quote_text(text));
}

Status refused(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

// The first of the arguments that belong to no flag; a value may hang on it ("--flag=value").
// Behind "--", which is no error itself, all are plain arguments.
Status check_extras(std::span<const std::string> extras) {
  const bool ended = !extras.empty() && extras.front() == "--";
  if (ended) extras = extras.subspan(1);
  if (extras.empty()) return ok_status();
  std::string_view extra = extras.front();
  const bool option = !ended && extra.size() > 1 && extra.front() == '-';
  if (option) extra = extra.substr(0, extra.find('='));
  return refused(fmt::format("{} {}", option ? "unknown option" : "unexpected argument",
                             base::quote_text(extra)));
}

}  // namespace

std::string environment_name(std::string_view flag) {
  std::string name = "SPIN_";
  for (const char c : flag) {
    const bool lower = c >= 'a' && c <= 'z';
    name.push_back(c == '-' ? '_' : lower ? static_cast<char>(c - 'a' + 'A') : c);
  }
  return name;
}

std::string wrap_text(std::string_view text, size_t indent, size_t width) {
  std::string out;
  std::string line(indent, ' ');
  while (!text.empty()) {
    const size_t space = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, space);
    text.remove_prefix(std::min(space + 1, text.size()));
    if (word.empty()) continue;
    if (line.size() > indent && line.size() + 1 + word.size() > width) {
      out += line + "\n";
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line.push_back(' ');
    line += word;
  }
  if (line.size() > indent) out += line + "\n";
  return out;
}

FlagTable::FlagTable(std::string command, std::string usage, std::string about)
    : command_(std::move(command)), usage_(std::move(usage)), about_(std::move(about)) {}

void FlagTable::group(std::string title) { group_ = std::move(title); }

FlagTable::Flag& FlagTable::add(const FlagHelp& help, std::string notes) {
  Flag flag;
  flag.name = help.name;
  flag.value = help.value;
  flag.text = fmt::format("{}. {}", help.text, notes);
  flag.group = group_;
  flag.environment = environment_name(help.name);
  flags_.push_back(std::move(flag));
  return flags_.back();
}

void FlagTable::add_count(const FlagHelp& help, uint32_t& target, CountRange range) {
  range.max = std::min<uint64_t>(range.max, std::numeric_limits<uint32_t>::max());
  const std::string expected = range_text(range);
  add(help, notes(expected, default_text(fmt::to_string(target)))).set =
      setter(target, expected, [range](std::string_view text) -> std::optional<uint32_t> {
        const std::optional<uint64_t> value = parse_count(text, range);
        if (!value) return std::nullopt;
        return static_cast<uint32_t>(*value);
      });
}

void FlagTable::add_count(const FlagHelp& help, uint64_t& target, CountRange range) {
  const std::string expected = range_text(range);
  add(help, notes(expected, default_text(fmt::to_string(target)))).set =
      setter(target, expected, [range](std::string_view text) { return parse_count(text, range); });
}

void FlagTable::add_count(const FlagHelp& help, std::optional<uint64_t>& target, CountRange range) {
  const std::string expected = range_text(range);
  add(help, notes(expected, default_text(help.unset))).set =
      setter(target, expected, [range](std::string_view text) { return parse_count(text, range); });
}

void FlagTable::add_signed(const FlagHelp& help,
                           std::optional<int64_t>& target,
                           int64_t min,
                           int64_t max) {
  const std::string expected = fmt::format("an integer from {} to {}", min, max);
  add(help, notes(expected, default_text(help.unset))).set = setter(
      target, expected, [min, max](std::string_view text) { return parse_signed(text, min, max); });
}

void FlagTable::add_real(const FlagHelp& help, double& target, RealRange range) {
  const std::string expected = range_text(range);
  add(help, notes(expected, default_text(fmt::to_string(target)))).set =
      setter(target, expected, [range](std::string_view text) { return parse_real(text, range); });
}

void FlagTable::add_real(const FlagHelp& help, std::optional<double>& target, RealRange range) {
  const std::string expected = range_text(range);
  add(help, notes(expected, default_text(help.unset))).set =
      setter(target, expected, [range](std::string_view text) { return parse_real(text, range); });
}

void FlagTable::add_real(const FlagHelp& help, std::optional<float>& target, RealRange range) {
  const std::string expected = range_text(range);
  add(help, notes(expected, default_text(help.unset))).set =
      setter(target, expected, [range](std::string_view text) -> std::optional<float> {
        const std::optional<double> value = parse_real(text, range);
        if (!value) return std::nullopt;
        return static_cast<float>(*value);
      });
}

void FlagTable::add_switch(const FlagHelp& help, bool& target) {
  Flag& flag = add(help, default_text(target ? "on" : "off"));
  flag.is_switch = true;
  flag.set = setter(target, "1, 0, true or false", parse_bool);
}

void FlagTable::add_switch(const FlagHelp& help, std::optional<bool>& target) {
  Flag& flag = add(help, default_text(help.unset));
  flag.is_switch = true;
  flag.set = setter(target, "1, 0, true or false", parse_bool);
}

void FlagTable::add_choice(const FlagHelp& help,
                           std::vector<std::string> choices,
                           std::string default_choice,
                           std::function<void(size_t)> set) {
  const std::string expected = fmt::format("one of {}", fmt::join(choices, ", "));
  add(help, notes(expected, default_text(default_choice))).set =
      [choices = std::move(choices), expected, set = std::move(set)](std::string_view text) {
        const auto it = std::find(choices.begin(), choices.end(), text);
        if (it == choices.end()) return expected;
        set(static_cast<size_t>(it - choices.begin()));
        return std::string();
      };
}

void FlagTable::add_text(const FlagHelp& help, std::string& target, TextRule rule) {
  const std::string default_note = !help.unset.empty() ? std::string(help.unset)
                                   : target.empty()    ? "none"
                                                       : target;
  add(help, default_text(default_note)).set =
      setter(target, text_range(rule), [rule](std::string_view text) {
        return fits(text, rule) ? std::optional<std::string>(text) : std::nullopt;
      });
}

void FlagTable::add_text(const FlagHelp& help, std::optional<std::string>& target, TextRule rule) {
  add(help, default_text(help.unset)).set =
      setter(target, text_range(rule), [rule](std::string_view text) {
        return fits(text, rule) ? std::optional<std::string>(text) : std::nullopt;
      });
}

void FlagTable::add_texts(const FlagHelp& help, std::vector<std::string>& target, TextRule rule) {
  Flag& flag = add(help, fmt::format("Can be repeated, at most {} times. Range: {}. {}",
                                     rule.max_count, text_range(rule), default_text(help.unset)));
  flag.repeatable = true;
  flag.set = [&target, rule](std::string_view text) -> std::string {
    if (!fits(text, rule)) return text_range(rule);
    if (target.size() == rule.max_count) return fmt::format("at most {} values", rule.max_count);
    target.emplace_back(text);
    return "";
  };
}

void FlagTable::add_parsed(const FlagHelp& help,
                           std::string range,
                           std::function<std::string(std::string_view)> set) {
  Flag& flag =
      add(help, fmt::format("Can be repeated. Range: {}. {}", range, default_text(help.unset)));
  flag.repeatable = true;
  flag.set = std::move(set);
}

void FlagTable::add_one(const FlagHelp& help,
                        std::string range,
                        std::function<std::string(std::string_view)> set) {
  add(help, notes(range, default_text(help.unset))).set = std::move(set);
}

void FlagTable::also_positional(std::string name) { flags_.back().positional = std::move(name); }
void FlagTable::also_named(std::string name) { flags_.back().alias = std::move(name); }
void FlagTable::make_required() { flags_.back().required = true; }
void FlagTable::refuse_empty_environment() { flags_.back().refuse_empty = true; }

Status FlagTable::parse(std::span<const std::string> args, const Environment& environment) {
  SPIN_RETURN_IF_ERROR(parse_arguments(args));
  SPIN_RETURN_IF_ERROR(parse_environment(environment));
  for (const Flag& flag : flags_) {
    if (flag.required && !flag.given) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--{} is required (or the environment variable {})", flag.name,
                                flag.environment),
                    flag.name);
    }
  }
  return ok_status();
}

// CLI11 throws for every refusal; here that becomes a Status. Values are checked and stored by the
// validator, which sees each of them in the order of the command line, so the last one wins.
Status FlagTable::parse_arguments(std::span<const std::string> args) {
  try {
    CLI::App app;
    app.set_help_flag("-h,--help");
    app.allow_extras();  // its own error lists them backwards
    const CLI::callback_t accept = [](const CLI::results_t&) { return true; };
    for (Flag& flag : flags_) {
      std::string spelling = "--" + flag.name;
      if (!flag.alias.empty()) spelling += ",--" + flag.alias;
      if (!flag.positional.empty()) spelling = flag.positional + "," + spelling;
      // The part after ! makes CLI11 hand over "false".
      if (flag.is_switch) spelling += fmt::format(",!--no-{}", flag.name);
      CLI::Option* option =
          flag.is_switch ? app.add_flag(spelling) : app.add_option(spelling, accept);
      if (!flag.is_switch) option->expected(1)->allow_extra_args(false);
      option->multi_option_policy(flag.repeatable ? CLI::MultiOptionPolicy::TakeAll
                                                  : CLI::MultiOptionPolicy::TakeLast);
      option->check(
          [&flag](const std::string& text) {
            flag.given = true;
            const std::string expected = flag.set(text);
            return expected.empty() ? expected : found(expected, text);
          },
          "");
    }
    std::vector<std::string> reversed(args.rbegin(), args.rend());
    app.parse(reversed);
    SPIN_RETURN_IF_ERROR(check_extras(app.remaining()));
  } catch (const CLI::CallForHelp&) {
    return Status(StatusCode::kCancelled, "help");
  } catch (const CLI::ArgumentMismatch& error) {  // every option takes exactly one value
    const std::string_view text = error.what();
    return refused(fmt::format("{}: expected a value, found none",
                               base::printable_text(text.substr(0, text.find(": ")))));
  } catch (const CLI::Error& error) {
    // It repeats the arguments as they are.
    return refused(base::printable_text(error.what()));
  }
  return ok_status();
}

Status FlagTable::parse_environment(const Environment& environment) {
  for (Flag& flag : flags_) {
    const char* value = flag.given ? nullptr : environment(flag.environment.c_str());
    if (value == nullptr) continue;
    const std::string_view text = value;
    if (text.empty() && !flag.refuse_empty) continue;
    flag.given = true;
    const std::string expected = flag.set(text);
    if (!expected.empty()) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("environment variable {}: {}", flag.environment, found(expected, text)),
          flag.name);
    }
  }
  return ok_status();
}

std::string FlagTable::help() const {
  std::string out = fmt::format("Usage: spin {} {}\n\n", command_, usage_);
  out += wrap_text(about_, 0, kHelpWidth);
  std::string_view group;
  for (const Flag& flag : flags_) {
    if (flag.group != group) {
      group = flag.group;
      out += fmt::format("\n{}:\n", group);
    }
    std::string head = flag.is_switch ? fmt::format("--{0}, --no-{0}", flag.name)
                                      : fmt::format("--{} {}", flag.name, flag.value);
    if (!flag.alias.empty()) head = fmt::format("--{}, {}", flag.alias, head);
    if (!flag.positional.empty()) head = fmt::format("{}, {}", flag.positional, head);
    out += fmt::format("  {}{}\n", head, flag.required ? " (required)" : "");
    out += wrap_text(fmt::format("{} [{}]", flag.text, flag.environment), 6, kHelpWidth);
  }
  out += "  -h, --help\n      Prints this text.\n";
  return out;
}

std::vector<std::string> FlagTable::flag_names() const {
  std::vector<std::string> names;
  for (const Flag& flag : flags_) {
    names.push_back("--" + flag.name);
    if (flag.is_switch) names.push_back("--no-" + flag.name);
  }
  return names;
}

}  // namespace spin::cli
