// SPDX-License-Identifier: Apache-2.0
#include "io/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "base/quote.h"
#include "io/gguf.h"
#include "io/open_file.h"
#include "io/safetensors.h"

namespace spin::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
// A folder with more entries than this is not a checkpoint.
constexpr size_t kMaxEntries = 100'000;

bool is_pickle(std::string_view name) {
  return name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth") ||
         name.ends_with(".ckpt") || name.ends_with(".pkl");
}

Status pickle_refused(const std::string& name) {
  return Status(StatusCode::kUnsupported,
                fmt::format("expected a safetensors or GGUF checkpoint, found {}: pickle files can "
                            "run code when they are read and are never opened; convert it to "
                            "safetensors",
                            base::quote_text(name)));
}

// Sorted names of the directory's entries.
Result<std::vector<std::string>> list(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (names.size() == kMaxEntries) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("{}: expected at most {} files, found more",
                                file_name_of(directory), kMaxEntries));
    }
    names.push_back(it->path().filename().string());
  }
  if (error) {
    return Status(StatusCode::kIoError,
                  file_name_of(directory) + ": cannot list: " + error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> with_suffix(const std::vector<std::string>& names,
                                     std::string_view suffix) {
  std::vector<std::string> out;
  for (const std::string& name : names) {
    if (name.ends_with(suffix)) out.push_back(name);
  }
  return out;
}

Result<CheckpointPath> locate_in_directory(const std::string& directory) {
  SPIN_ASSIGN_OR_RETURN(const auto names, list(directory));
  const auto found = [&](CheckpointKind kind, std::string_view name) {
    return CheckpointPath{kind, directory, directory + "/" + std::string(name), directory};
  };
  const auto has = [&](std::string_view name) {
    return std::binary_search(names.begin(), names.end(), name);
  };
  if (has(kIndexName)) return found(CheckpointKind::kSafetensorsIndex, kIndexName);
  if (has(kSingleName)) return found(CheckpointKind::kSafetensorsFile, kSingleName);
  for (const auto& [suffix, kind] :
       {std::pair{std::string_view(".safetensors"), CheckpointKind::kSafetensorsFile},
        std::pair{std::string_view(".gguf"), CheckpointKind::kGguf}}) {
    const auto matching = with_suffix(names, suffix);
    if (matching.size() > 1) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}: expected one {} file, found {} (the first is {}); give the "
                                "path of the file",
                                file_name_of(directory), suffix, matching.size(),
                                base::quote_text(matching[0])));
    }
    if (matching.size() == 1) return found(kind, matching[0]);
  }
  for (const std::string& name : names) {
    if (is_pickle(name)) return pickle_refused(name).with_context(file_name_of(directory));
  }
  return Status(StatusCode::kNotFound,
                fmt::format("{}: expected {}, {}, or one .safetensors or .gguf file, found none "
                            "of them among {} entries",
                            file_name_of(directory), kIndexName, kSingleName, names.size()));
}

}  // namespace

Result<CheckpointPath> locate_checkpoint(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::directory) return locate_in_directory(path);
  const std::string name = file_name_of(path);
  if (status.type() == fs::file_type::not_found) {
    // The last words are for those who gave the name of a repository.
    return Status(StatusCode::kNotFound,
                  name + ": no such file or directory (nothing is downloaded)");
  }
  if (status.type() != fs::file_type::regular) {
    return Status(StatusCode::kInvalidArgument,
                  name + ": expected a directory or a regular file, found something else");
  }
  const std::string parent = fs::path(path).parent_path().string();
  const std::string directory = parent.empty() ? "." : parent;
  if (name.ends_with(".gguf")) return CheckpointPath{CheckpointKind::kGguf, directory, path, path};
  if (name.ends_with(".safetensors")) {
    return CheckpointPath{CheckpointKind::kSafetensorsFile, directory, path, directory};
  }
  if (name.ends_with(".safetensors.index.json")) {
    return CheckpointPath{CheckpointKind::kSafetensorsIndex, directory, path, directory};
  }
  if (is_pickle(name)) return pickle_refused(name);
  return Status(StatusCode::kUnsupported,
                name +
                    ": expected a directory, a .gguf or a .safetensors file, found another "
                    "file type");
}

Result<std::unique_ptr<TensorSource>> open_checkpoint(const CheckpointPath& where) {
  switch (where.kind) {
    case CheckpointKind::kGguf: {
      SPIN_ASSIGN_OR_RETURN(auto file, GgufFile::open(where.file));
      return std::unique_ptr<TensorSource>(std::move(file));
    }
    case CheckpointKind::kSafetensorsIndex: {
      SPIN_ASSIGN_OR_RETURN(auto file,
                            SafetensorsCheckpoint::open(where.directory, file_name_of(where.file)));
      return std::unique_ptr<TensorSource>(std::move(file));
    }
    case CheckpointKind::kSafetensorsFile:
      break;
  }
  SPIN_ASSIGN_OR_RETURN(auto file, SafetensorsFile::open(where.file));
  return std::unique_ptr<TensorSource>(std::move(file));
}

Result<std::unique_ptr<TensorSource>> open_checkpoint(const std::string& path) {
  SPIN_ASSIGN_OR_RETURN(const CheckpointPath where, locate_checkpoint(path));
  return open_checkpoint(where);
}

}  // namespace spin::io
