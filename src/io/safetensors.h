// SPDX-License-Identifier: Apache-2.0
// Safetensors files, alone or sharded by model.safetensors.index.json.
//
// Accepted: a u64 header length, a JSON object (spaces may pad it), tensor bytes. The tensors must
// tile the rest of the file without gap, overlap or trailing bytes, and each must be exactly as
// long as its type and shape say; keys must be unique. F32, F16 and BF16 are decoded, every other
// type is listed as unsupported.
//
// Thread: immutable after opening.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/mapped_file.h"
#include "io/tensor_source.h"
#include "spin/status.h"

namespace spin::io {

// The reference implementation's limit, in bytes.
constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

class SafetensorsFile : public TensorSource {
 public:
  // Errors: those of MappedFile::open and of parse.
  static Result<std::unique_ptr<SafetensorsFile>> open(const std::string& path);
  // Errors: kCorrupt, with what was expected, what was found and at which offset.
  static Result<std::unique_ptr<SafetensorsFile>> parse(MappedFile file);

  Result<std::span<const std::byte>> bytes(const TensorInfo& info) const override;
  void drop(const TensorInfo& info) const override;

  // The header's "__metadata__" (text to text); empty when there is none.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const MappedFile& file() const { return file_; }

 private:
  explicit SafetensorsFile(MappedFile file) : file_(std::move(file)) {}
  Status read();

  MappedFile file_;
  std::map<std::string, std::string> metadata_;
};

class SafetensorsCheckpoint : public TensorSource {
 public:
  // Opens the shards named by `directory`/`index_name`. Each tensor must be in the shard that the
  // index names, and each shard must hold only tensors of the index.
  // Errors: kCorrupt (also for a shard name that is not a plain file name), kNotFound (a shard is
  // missing), those of SafetensorsFile::open.
  static Result<std::unique_ptr<SafetensorsCheckpoint>> open(
      const std::string& directory, const std::string& index_name = "model.safetensors.index.json");

  Result<std::span<const std::byte>> bytes(const TensorInfo& info) const override;
  void drop(const TensorInfo& info) const override;

 private:
  SafetensorsCheckpoint() = default;

  std::vector<std::unique_ptr<SafetensorsFile>> shards_;  // by TensorInfo::shard
};

}  // namespace spin::io
