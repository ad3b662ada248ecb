// SPDX-License-Identifier: Apache-2.0
// From the path a user names to the checkpoint in it. Only safetensors and GGUF are ever opened:
// pickle files (.bin, .pt, .pth, .ckpt) run code when read and are refused by name.
//
// Thread: any.
#pragma once

#include <memory>
#include <string>

#include "io/tensor_source.h"
#include "spin/status.h"

namespace spin::io {

enum class CheckpointKind {
  kSafetensorsFile,   // one file
  kSafetensorsIndex,  // model.safetensors.index.json and its shards
  kGguf,
};

struct CheckpointPath {
  CheckpointKind kind = CheckpointKind::kSafetensorsFile;
  std::string directory;  // where config.json and tokenizer.json would lie
  std::string file;       // path of the file to open (of the index, if there is one)
  // Where its tokenizer is: a GGUF file that was named itself has it inside, all others have it in
  // `directory`.
  std::string tokenizer;
};

// `path` is a .gguf file, a .safetensors file, or a directory with, in this order of preference,
// model.safetensors.index.json, model.safetensors, one *.safetensors, one *.gguf.
// Errors: kNotFound (no such path, or nothing in it that can be opened), kInvalidArgument (several
// candidates; name the file), kUnsupported (only pickle files; another file type).
Result<CheckpointPath> locate_checkpoint(const std::string& path);

// Errors: those of locate_checkpoint and of the format's open().
Result<std::unique_ptr<TensorSource>> open_checkpoint(const std::string& path);
Result<std::unique_ptr<TensorSource>> open_checkpoint(const CheckpointPath& where);

}  // namespace spin::io
