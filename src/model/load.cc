// SPDX-License-Identifier: Apache-2.0
#include "model/load.h"

#include <algorithm>
#include <utility>

#include "io/gguf.h"
#include "io/text_file.h"
#include "model/model_limits.h"

namespace spin::model {
namespace {

Status read_directory_configs(const std::string& directory, ModelFiles& files) {
  SPIN_ASSIGN_OR_RETURN(const std::string config,
                        io::read_text_file(directory + "/config.json", kMaxConfigBytes));
  SPIN_ASSIGN_OR_RETURN(files.config, config_from_json(config));
  const auto generation =
      io::read_text_file(directory + "/generation_config.json", kMaxConfigBytes);
  if (generation.status().code() == StatusCode::kNotFound) return ok_status();
  SPIN_RETURN_IF_ERROR(generation.status());
  SPIN_ASSIGN_OR_RETURN(files.generation, generation_config_from_json(*generation));
  for (uint32_t id : files.generation.eos_ids) {
    std::vector<uint32_t>& known = files.config.eos_ids;
    if (std::find(known.begin(), known.end(), id) == known.end()) known.push_back(id);
  }
  return check_config(files.config).with_context("generation_config.json");
}

}  // namespace

Result<ModelFiles> open_model(const std::string& path) {
  ModelFiles files;
  SPIN_ASSIGN_OR_RETURN(files.path, io::locate_checkpoint(path));
  SPIN_ASSIGN_OR_RETURN(files.source, io::open_checkpoint(files.path));
  if (const io::GgufMetadata* metadata = files.source->gguf_metadata()) {
    SPIN_ASSIGN_OR_RETURN(files.config, config_from_gguf(*metadata, *files.source));
  } else {
    SPIN_RETURN_IF_ERROR(read_directory_configs(files.path.directory, files));
  }
  SPIN_RETURN_IF_ERROR(check_tensors(*files.source, files.config));
  return files;
}

Result<std::unique_ptr<Decoder>> load_decoder(const ModelFiles& files,
                                              backend::Device& device,
                                              const LoadOptions& options) {
  SPIN_ASSIGN_OR_RETURN(ModelWeights weights,
                        load_weights(*files.source, files.config, device, options.weights));
  return Decoder::create(files.config, std::move(weights), device, options.max_rows);
}

}  // namespace spin::model
