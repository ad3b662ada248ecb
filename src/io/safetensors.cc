// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <simdjson.h>

#include "base/checked_math.h"
#include "base/quote.h"
#include "io/block_quant.h"
#include "io/byte_reader.h"
#include "io/text_file.h"

namespace spin::io {
namespace {

namespace dom = simdjson::dom;
using base::quote_text;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxIndexBytes = kMaxSafetensorsHeaderBytes;
constexpr size_t kMaxDimensions = 16;
constexpr size_t kMaxTypeNameBytes = 16;
constexpr size_t kMaxShards = 10'000;
// {"tensor": {"shape": [n]}} is three deep.
constexpr size_t kMaxHeaderDepth = 8;

struct DType {
  std::string_view name;
  uint32_t bits;
  ElementType type;
};
constexpr std::array<DType, 21> kDTypes = {{
    {"F32", 32, ElementType::kF32},
    {"F16", 16, ElementType::kF16},
    {"BF16", 16, ElementType::kBF16},
    {"F64", 64, ElementType::kUnsupported},
    {"BOOL", 8, ElementType::kUnsupported},
    {"U8", 8, ElementType::kUnsupported},
    {"I8", 8, ElementType::kUnsupported},
    {"U16", 16, ElementType::kUnsupported},
    {"I16", 16, ElementType::kUnsupported},
    {"U32", 32, ElementType::kUnsupported},
    {"I32", 32, ElementType::kUnsupported},
    {"U64", 64, ElementType::kUnsupported},
    {"I64", 64, ElementType::kUnsupported},
    {"C64", 64, ElementType::kUnsupported},
    {"F4", 4, ElementType::kUnsupported},
    {"F6_E2M3", 6, ElementType::kUnsupported},
    {"F6_E3M2", 6, ElementType::kUnsupported},
    {"F8_E4M3", 8, ElementType::kUnsupported},
    {"F8_E5M2", 8, ElementType::kUnsupported},
    {"F8_E8M0", 8, ElementType::kUnsupported},
    {"F8_E4M3FNUZ", 8, ElementType::kUnsupported},
}};

Status corrupt(std::string message) { return Status(StatusCode::kCorrupt, std::move(message)); }

const DType* find_dtype(std::string_view name) {
  for (const DType& dtype : kDTypes) {
    if (dtype.name == name) return &dtype;
  }
  return nullptr;
}

// An array of unsigned integers, at most `out.max` of them.
bool read_uints(dom::element value, size_t most, std::vector<uint64_t>& out) {
  dom::array array;
  if (value.get(array) != simdjson::SUCCESS || array.size() > most) return false;
  out.reserve(array.size());
  for (dom::element item : array) {
    uint64_t number = 0;
    if (item.get(number) != simdjson::SUCCESS) return false;
    out.push_back(number);
  }
  return true;
}

// Bytes of a tensor of this type and shape; nothing on overflow or with half a byte left.
std::optional<uint64_t> size_of(const DType& dtype, uint64_t elements) {
  if (dtype.bits % 8 == 0) return base::checked_mul<uint64_t>(elements, dtype.bits / 8);
  const auto bits = base::checked_mul<uint64_t>(elements, dtype.bits);
  if (!bits || *bits % 8 != 0) return std::nullopt;
  return *bits / 8;
}

// One entry of the header; offsets are still relative to the data. `where` names the header.
Status read_entry(dom::object entry, const std::string& where, TensorInfo& info) {
  std::vector<uint64_t> offsets;
  bool has_type = false, has_shape = false, has_offsets = false;
  for (const auto& [key, value] : entry) {
    bool good = true;
    std::string_view text;
    if (key == "dtype") {
      good = !std::exchange(has_type, true) && value.get(text) == simdjson::SUCCESS &&
             !text.empty() && text.size() <= kMaxTypeNameBytes;
      info.type_name = std::string(text.substr(0, kMaxTypeNameBytes));
    } else if (key == "shape") {
      good = !std::exchange(has_shape, true) && read_uints(value, kMaxDimensions, info.shape);
    } else if (key == "data_offsets") {
      good =
          !std::exchange(has_offsets, true) && read_uints(value, 2, offsets) && offsets.size() == 2;
    } else {
      good = false;
    }
    if (!good) {
      return corrupt(
          fmt::format("tensor {}: expected one dtype (a name), one shape (up to {} "
                      "sizes) and one data_offsets (two numbers) in {}, found a bad or "
                      "repeated {}",
                      quote_text(info.name), kMaxDimensions, where, quote_text(key)));
    }
  }
  if (!has_type || !has_shape || !has_offsets) {
    return corrupt(
        fmt::format("tensor {}: expected dtype, shape and data_offsets in {}, found {} "
                    "of them",
                    quote_text(info.name), where, has_type + has_shape + has_offsets));
  }
  if (offsets[1] < offsets[0]) {
    return corrupt(
        fmt::format("tensor {}: expected data_offsets in rising order in {}, found "
                    "[{}, {}]",
                    quote_text(info.name), where, offsets[0], offsets[1]));
  }
  info.offset = offsets[0];
  info.size_bytes = offsets[1] - offsets[0];
  return ok_status();
}

// Fills in `elements` and `type`; the bytes must be exactly what type and shape ask for.
Status check_shape(TensorInfo& info, const std::string& where) {
  const auto elements = base::checked_product(info.shape);
  if (!elements) {
    return corrupt(
        fmt::format("tensor {}: expected a shape with a product below 2^64 in {}, found "
                    "[{}] (tensor size overflow)",
                    quote_text(info.name), where, fmt::join(info.shape, ", ")));
  }
  info.elements = *elements;
  const DType* dtype = find_dtype(info.type_name);
  if (dtype == nullptr) return ok_status();  // listed; its size cannot be known
  info.type = dtype->type;
  const auto size = size_of(*dtype, *elements);
  if (size != info.size_bytes) {
    return corrupt(fmt::format(
        "tensor {}: expected {} bytes for {} of shape [{}] in {}, found {} at data offset {}",
        quote_text(info.name), size ? std::to_string(*size) : "a possible number of",
        info.type_name, fmt::join(info.shape, ", "), where, info.size_bytes, info.offset));
  }
  return ok_status();
}

// The tensors must lie end to end from `data_start` to the end of the file. Sorts them by place and
// makes their offsets absolute.
Status place_tensors(uint64_t data_start, uint64_t file_size, std::vector<TensorInfo>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset, a.size_bytes, a.name) < std::tie(b.offset, b.size_bytes, b.name);
  });
  const uint64_t data_bytes = file_size - data_start;
  uint64_t end = 0;  // <= data_bytes
  for (TensorInfo& info : tensors) {
    if (info.offset != end) {
      return corrupt(fmt::format(
          "tensor {}: expected to begin at data offset {}, where the one before ends, found {} "
          "(file offset {})",
          quote_text(info.name), end, info.offset, data_start + end));
    }
    if (info.size_bytes > data_bytes - end) {
      return corrupt(fmt::format("tensor {}: expected {} bytes at offset {}, found {}",
                                 quote_text(info.name), info.size_bytes, data_start + end,
                                 data_bytes - end));
    }
    info.offset = data_start + end;
    end += info.size_bytes;
  }
  if (end != data_bytes) {
    return corrupt(
        fmt::format("expected the end of the file at offset {}, after the last tensor, "
                    "found {} more bytes",
                    data_start + end, data_bytes - end));
  }
  return ok_status();
}

Status read_metadata(dom::element value, std::map<std::string, std::string>& out) {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) {
    return corrupt(
        "__metadata__: expected an object in the header at offset 8, found something "
        "else");
  }
  for (const auto& [key, item] : object) {
    std::string_view text;
    if (item.get(text) != simdjson::SUCCESS || !out.emplace(key, text).second) {
      return corrupt(
          fmt::format("__metadata__: expected one text for {} in the header at offset "
                      "8, found another type or two",
                      quote_text(key)));
    }
  }
  return ok_status();
}

// Parses `text` (an object) into `parser`'s tree. `where` names it in messages.
Result<dom::object> parse_object(std::string_view text,
                                 const std::string& where,
                                 dom::parser& parser) {
  if (text.empty() || text.front() != '{') {
    return corrupt("expected '{' at the start of " + where + ", found something else");
  }
  if (parser.allocate(text.size(), kMaxHeaderDepth) != simdjson::SUCCESS) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("no memory to read {} ({} bytes)", where, text.size()));
  }
  dom::element root;
  dom::object object;
  auto error = parser.parse(text.data(), text.size(), /*realloc_if_needed=*/true).get(root);
  if (error == simdjson::SUCCESS) error = root.get(object);
  if (error != simdjson::SUCCESS) {
    return corrupt(fmt::format("expected a JSON object of depth {} or less in {}, found: {}",
                               kMaxHeaderDepth, where, simdjson::error_message(error)));
  }
  return object;
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_plain_shard_name(std::string_view name) {
  constexpr std::string_view kSuffix = ".safetensors";
  return name.size() > kSuffix.size() && name.size() <= 255 && name.ends_with(kSuffix) &&
         name.find('/') == std::string_view::npos && name.find('\\') == std::string_view::npos &&
         name.find("..") == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

// Tensor name and shard name, sorted by tensor name.
using WeightMap = std::vector<std::pair<std::string, std::string>>;

Result<WeightMap> read_weight_map(dom::object index, const std::string& where) {
  WeightMap map;
  bool found = false;
  for (const auto& [key, value] : index) {
    if (key != "weight_map") continue;  // "metadata" and whatever tools add
    dom::object object;
    if (std::exchange(found, true) || value.get(object) != simdjson::SUCCESS) {
      return corrupt("weight_map: expected one object in " + where + ", found another type or two");
    }
    for (const auto& [tensor, file] : object) {
      std::string_view name;
      if (file.get(name) != simdjson::SUCCESS || !is_plain_shard_name(name)) {
        return corrupt(
            fmt::format("weight_map: expected a plain name of a .safetensors file for "
                        "tensor {} in {}, found {}",
                        quote_text(tensor), where, quote_text(name)));
      }
      map.emplace_back(tensor, name);
    }
  }
  if (!found) return corrupt("weight_map: expected an object in " + where + ", found none");
  std::sort(map.begin(), map.end());
  for (size_t i = 1; i < map.size(); ++i) {
    if (map[i - 1].first == map[i].first) {
      return corrupt(fmt::format("weight_map: expected tensor {} once in {}, found it twice",
                                 quote_text(map[i].first), where));
    }
  }
  return map;
}

}  // namespace

Result<std::unique_ptr<SafetensorsFile>> SafetensorsFile::open(const std::string& path) {
  SPIN_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  return parse(std::move(file));
}

Result<std::unique_ptr<SafetensorsFile>> SafetensorsFile::parse(MappedFile file) {
  std::unique_ptr<SafetensorsFile> out(new SafetensorsFile(std::move(file)));
  const Status status = out->read();
  if (!status.ok()) return status.with_context(out->file_.name());
  return out;
}

Status SafetensorsFile::read() {
  ByteReader reader(file_.bytes());
  SPIN_ASSIGN_OR_RETURN(const uint64_t length, reader.u64("header length"));
  if (length > kMaxSafetensorsHeaderBytes) {
    return corrupt(fmt::format("header length: expected at most {} at offset 0, found {}",
                               kMaxSafetensorsHeaderBytes, length));
  }
  SPIN_ASSIGN_OR_RETURN(const auto header, reader.bytes(length, "header"));
  const std::string where =
      fmt::format("the header of {} bytes at offset {}", length, kLengthBytes);
  dom::parser parser(length + simdjson::SIMDJSON_PADDING);
  SPIN_ASSIGN_OR_RETURN(const dom::object object, parse_object(as_text(header), where, parser));
  std::vector<TensorInfo> tensors;
  tensors.reserve(object.size());  // bounded by the header that was just parsed
  bool has_metadata = false;
  for (const auto& [key, value] : object) {
    if (key == "__metadata__") {
      if (std::exchange(has_metadata, true)) {
        return corrupt("expected __metadata__ once in " + where + ", found it twice");
      }
      SPIN_RETURN_IF_ERROR(read_metadata(value, metadata_));
      continue;
    }
    TensorInfo& info = tensors.emplace_back();
    info.name = std::string(key);
    dom::object entry;
    if (value.get(entry) != simdjson::SUCCESS) {
      return corrupt(fmt::format("tensor {}: expected an object in {}, found something else",
                                 quote_text(key), where));
    }
    SPIN_RETURN_IF_ERROR(read_entry(entry, where, info));
    SPIN_RETURN_IF_ERROR(check_shape(info, where));
  }
  SPIN_RETURN_IF_ERROR(place_tensors(reader.position(), file_.size(), tensors));
  return set_tensors(std::move(tensors));
}

Result<std::span<const std::byte>> SafetensorsFile::bytes(const TensorInfo& info) const {
  return file_.slice(info.offset, info.size_bytes);
}

void SafetensorsFile::drop(const TensorInfo& info) const {
  file_.drop(info.offset, info.size_bytes);
}

Result<std::unique_ptr<SafetensorsCheckpoint>> SafetensorsCheckpoint::open(
    const std::string& directory, const std::string& index_name) {
  SPIN_ASSIGN_OR_RETURN(const std::string text,
                        read_text_file(directory + "/" + index_name, kMaxIndexBytes));
  dom::parser parser;
  SPIN_ASSIGN_OR_RETURN(const dom::object object, parse_object(text, index_name, parser));
  SPIN_ASSIGN_OR_RETURN(const WeightMap weight_map, read_weight_map(object, index_name));
  std::map<std::string, uint32_t> shard_ids;
  for (const auto& [tensor, shard] : weight_map) shard_ids.emplace(shard, 0);
  if (shard_ids.size() > kMaxShards) {
    return corrupt(fmt::format("{}: expected at most {} files, found {}", index_name, kMaxShards,
                               shard_ids.size()));
  }
  std::unique_ptr<SafetensorsCheckpoint> out(new SafetensorsCheckpoint());
  std::vector<TensorInfo> tensors;
  for (auto& [shard, id] : shard_ids) {
    id = static_cast<uint32_t>(out->shards_.size());
    SPIN_ASSIGN_OR_RETURN(auto file, SafetensorsFile::open(directory + "/" + shard));
    for (TensorInfo info : file->tensors()) {
      const auto place = std::lower_bound(weight_map.begin(), weight_map.end(),
                                          std::pair<std::string, std::string>(info.name, ""));
      if (place == weight_map.end() || place->first != info.name || place->second != shard) {
        return corrupt(fmt::format(
            "{}: expected tensor {} at offset {} to be listed in {} under "
            "this file, found it under {}",
            shard, quote_text(info.name), info.offset, index_name,
            place == weight_map.end() || place->first != info.name ? "none"
                                                                   : quote_text(place->second)));
      }
      info.shard = id;
      tensors.push_back(std::move(info));
    }
    out->shards_.push_back(std::move(file));
  }
  SPIN_RETURN_IF_ERROR(out->set_tensors(std::move(tensors)));
  for (const auto& [tensor, shard] : weight_map) {
    if (out->find(tensor) == nullptr) {
      return corrupt(fmt::format("{}: expected tensor {} in {}, found none of that name",
                                 index_name, quote_text(tensor), shard));
    }
  }
  return out;
}

Result<std::span<const std::byte>> SafetensorsCheckpoint::bytes(const TensorInfo& info) const {
  return shards_[info.shard]->bytes(info);
}

void SafetensorsCheckpoint::drop(const TensorInfo& info) const { shards_[info.shard]->drop(info); }

}  // namespace spin::io
