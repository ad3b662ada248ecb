// SPDX-License-Identifier: Apache-2.0
#include "sparse/selection_trace.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>
#include <utility>

#include "base/errno_text.h"

namespace spin::sparse {
namespace {

static_assert(std::endian::native == std::endian::little, "files are written as memory has them");

constexpr std::string_view kMagic = "SPINTRC1";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxSettingsBytes = 64 * 1024;
// Bounds of what a record may name, so that a reader's tables stay small.
constexpr uint32_t kMaxLayers = 4096;
constexpr uint32_t kMaxKvHeads = 4096;
constexpr uint32_t kMaxPageTokens = 4096;

Status corrupt(const std::string& what) {
  return Status(StatusCode::kCorrupt, "selection trace: " + what);
}

// Takes little-endian words off the front of a file.
class WordReader {
 public:
  explicit WordReader(std::string_view bytes) : bytes_(bytes) {}

  bool is_empty() const { return bytes_.empty(); }
  size_t left() const { return bytes_.size(); }
  [[nodiscard]] bool read(std::span<uint32_t> words) {
    if (bytes_.size() < words.size_bytes()) return false;
    if (!words.empty()) std::memcpy(words.data(), bytes_.data(), words.size_bytes());
    bytes_.remove_prefix(words.size_bytes());
    return true;
  }
  [[nodiscard]] bool read_text(size_t size, std::string& out) {
    if (bytes_.size() < size) return false;
    out.assign(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return true;
  }

 private:
  std::string_view bytes_;
};

Status check_header(const TraceHeader& header) {
  if (header.layers == 0 || header.layers > kMaxLayers) {
    return corrupt("layers must be 1 to 4096, found " + std::to_string(header.layers));
  }
  if (header.kv_heads == 0 || header.kv_heads > kMaxKvHeads) {
    return corrupt("KV heads must be 1 to 4096, found " + std::to_string(header.kv_heads));
  }
  if (header.page_tokens == 0 || header.page_tokens > kMaxPageTokens) {
    return corrupt("page tokens must be 1 to 4096, found " + std::to_string(header.page_tokens));
  }
  if (header.settings.size() > kMaxSettingsBytes) return corrupt("the settings are too long");
  return ok_status();
}

Result<TraceHeader> read_header(WordReader& reader) {
  std::string magic;
  uint32_t version = 0;
  if (!reader.read_text(kMagic.size(), magic) || magic != kMagic) {
    return corrupt("the file does not begin with " + std::string(kMagic));
  }
  if (!reader.read({&version, 1})) return corrupt("it ends within its header");
  if (version != kVersion) {
    return Status(StatusCode::kUnsupported,
                  "selection trace: version 1 is read, found " + std::to_string(version));
  }
  uint32_t words[4] = {};
  TraceHeader header;
  if (!reader.read(words)) return corrupt("it ends within its header");
  header.layers = words[0];
  header.kv_heads = words[1];
  header.page_tokens = words[2];
  if (words[3] > kMaxSettingsBytes) return corrupt("the settings are too long");
  if (!reader.read_text(words[3], header.settings)) return corrupt("it ends within its settings");
  SPIN_RETURN_IF_ERROR(check_header(header));
  return header;
}

Result<SelectionRecord> read_record(WordReader& reader, const TraceHeader& header) {
  uint32_t words[5] = {};
  if (!reader.read(words)) return corrupt("it ends within a record");
  SelectionRecord record;
  record.sequence = words[0];
  record.step = words[1];
  record.layer = words[2];
  record.kv_head = words[3];
  if (record.layer >= header.layers || record.kv_head >= header.kv_heads) {
    return corrupt("a record is of layer " + std::to_string(record.layer) + ", KV head " +
                   std::to_string(record.kv_head) + " of " + std::to_string(header.layers) + " x " +
                   std::to_string(header.kv_heads));
  }
  const uint32_t count = words[4];
  if (count > reader.left() / sizeof(uint32_t)) return corrupt("it ends within a list of pages");
  record.pages.resize(count);
  if (!reader.read(record.pages)) return corrupt("it ends within a list of pages");
  for (size_t i = 1; i < record.pages.size(); ++i) {
    if (record.pages[i - 1] >= record.pages[i]) return corrupt("pages of a list must ascend");
  }
  return record;
}

}  // namespace

struct SelectionRecorder::Impl {
  std::FILE* file = nullptr;
  uint32_t kv_heads = 0;
  int error = 0;  // errno of the first write that failed

  void write(const void* data, size_t bytes) {
    if (error == 0 && file != nullptr && bytes != 0 && std::fwrite(data, 1, bytes, file) != bytes)
      error = errno;
  }
  Status close() {
    if (file != nullptr && std::fclose(std::exchange(file, nullptr)) != 0 && error == 0) {
      error = errno;
    }
    if (error == 0) return ok_status();
    return Status(StatusCode::kIoError,
                  "the selection trace cannot be written: " + base::errno_text(error));
  }
};

SelectionRecorder::SelectionRecorder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

SelectionRecorder::~SelectionRecorder() {
  // Whoever wants to know whether all of it was written has called close().
  (void)impl_->close();
}

Result<std::unique_ptr<SelectionRecorder>> SelectionRecorder::create(const std::string& path,
                                                                     const TraceHeader& header) {
  if (const Status status = check_header(header); !status.ok()) {
    return Status(StatusCode::kInvalidArgument, status.message());
  }
  auto impl = std::make_unique<Impl>();
  impl->file = std::fopen(path.c_str(), "wbe");
  if (impl->file == nullptr) {
    return Status(StatusCode::kIoError, path + " cannot be written: " + base::errno_text(errno));
  }
  impl->kv_heads = header.kv_heads;
  const uint32_t words[] = {kVersion, header.layers, header.kv_heads, header.page_tokens,
                            static_cast<uint32_t>(header.settings.size())};
  impl->write(kMagic.data(), kMagic.size());
  impl->write(words, sizeof(words));
  impl->write(header.settings.data(), header.settings.size());
  return std::unique_ptr<SelectionRecorder>(new SelectionRecorder(std::move(impl)));
}

void SelectionRecorder::record(uint32_t sequence,
                               uint32_t step,
                               uint32_t layer,
                               const layout::PageList& list,
                               uint32_t first_page,
                               uint32_t end_page) {
  for (uint32_t head = 0; head < impl_->kv_heads; ++head) {
    const uint32_t* all = list.pages + uint64_t{head} * list.stride;
    const uint32_t* first = std::lower_bound(all, all + list.counts[head], first_page);
    const uint32_t* end = std::lower_bound(first, all + list.counts[head], end_page);
    const auto count = static_cast<uint32_t>(end - first);
    const uint32_t words[] = {sequence, step, layer, head, count};
    impl_->write(words, sizeof(words));
    impl_->write(first, count * sizeof(uint32_t));
  }
}

Status SelectionRecorder::close() { return impl_->close(); }

Result<SelectionTrace> parse_selection_trace(std::string_view bytes) {
  WordReader reader(bytes);
  SelectionTrace trace;
  SPIN_ASSIGN_OR_RETURN(trace.header, read_header(reader));
  while (!reader.is_empty()) {
    SPIN_ASSIGN_OR_RETURN(SelectionRecord record, read_record(reader, trace.header));
    trace.records.push_back(std::move(record));
  }
  return trace;
}

}  // namespace spin::sparse
