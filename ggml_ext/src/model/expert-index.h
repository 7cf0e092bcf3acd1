// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "base/status.h"
#include "model/calibration.h"
#include "model/expert.h"
#include "model/gguf-file.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hobbit {

bool is_base_tensor(const std::string & name); // llama.cpp's own name of a routed expert tensor
bool is_tier_tensor(const std::string & name); // the name of one of a further tier

struct layer_shape {
    uint32_t                block     = 0; // N of blk.N
    uint32_t                n_experts = 0;
    uint32_t                n_used    = 0; // experts of a token
    bool                    is_run    = true;
    part_set                parts; // parts that it has
    per_part<matrix_shape>  shapes;
    per_part<expert_tensor> tensors;
};

// The token embedding, if it is only used for looking up tokens' rows.
struct embedding_table {
    static constexpr const char * name = "token_embd.weight";

    part_location location; // size 0: there is none
    matrix_shape  shape;    // n_out rows of n_in
};

// A version of the format of files with two tiers: what such a file says of them, and what it must have.
struct tier_format {
    // The tier under llama.cpp's own names; none: there are no such names, and each expert is in one tier.
    std::optional<tier_id> base = tier_id::high;

    const char * high = ""; // kind of the high tier
    const char * low  = ""; // and of the low one

    // Fails if the file at `path` lacks what its tiers must have; null: the version is not known.
    status (*check)(const expert_index & index, const std::string & path) = nullptr;

    // See serving.
    precision (*served)(const expert_index & index, expert_id id, precision given) = nullptr;
};

// A format's name is its number in hobbit.version. It makes no objects: its traits are all.
using registered_format = registered<void, no_traits, tier_format>;

// Where every (tier, layer, part, expert) of a model lies. A model is a single or split GGUF; further tiers lie in the
// same file or in a sidecar. docs/format.md has the format. Immutable after open and set_... Layers are
// numbered without gaps.
class expert_index {
  public:
    // stored_keys: keys of the settings that files may store.
    explicit expert_index(std::vector<std::string> stored_keys = {}) : stored_keys_(std::move(stored_keys)) {}

    // A model without routed experts opens with n_layers() == 0. Otherwise every range is within its file, and every
    // tier has the shapes of the tensors under llama.cpp's names, and the experts that the file's tier_format asks for.
    // `sidecar` may be empty: a file of the default name is then used if it exists.
    status open(const std::string & path, const std::string & sidecar);

    // Adds the settings of the calibration beside the model, if there is one, to stored(). REQUIRES: open.
    status read_calibration(const std::string & path);

    size_t                n_layers() const { return layers_.size(); }
    std::vector<layer_id> layers() const; // all
    const layer_shape &   layer(layer_id i) const { return layers_[i]; }
    uint32_t              n_tiers() const { return layers_.empty() ? 0 : format_.check ? TIERS.size() : 1; }
    std::vector<tier_id>  tiers() const { return { TIERS.begin(), TIERS.begin() + n_tiers() }; }
    uint32_t              n_experts() const;                                 // the largest of any layer
    std::vector<uint32_t> experts_by_layer() const;                          // [layer] how many it has
    uint32_t              n_experts_used() const { return n_experts_used_; } // a token's, the largest of any layer

    // Tells how many experts a token uses in each block. Other layers have the most that the metadata name.
    void set_experts_used(const uint32_t * of_blocks, size_t n_blocks);

    // Blocks from n_blocks on are not run.
    void set_run_blocks(uint32_t n_blocks);

    // Returns true if the file has the expert's tier. REQUIRES: a stored tier
    bool has(tier_id tier, expert_id id) const { return locations_[tier][id.layer][part_id::down][id.expert].size > 0; }
    hobbit::serving serving() const; // valid as long as the index

    // The location has size 0 where the file has none. REQUIRES: a stored tier
    const part_location & locate(tier_id tier, layer_id layer, part_id part, uint32_t expert) const {
        return locations_[tier][layer][part][expert];
    }

    // Calls visit(id, part, location) for each matrix of the tier in layers first to last, by layer, part and expert.
    template <typename Visit>
    void each_matrix(tier_id tier, Visit visit, layer_id first = 0, layer_id last = INT32_MAX) const {
        for (layer_id layer = first; layer < locations_[tier].size() && layer <= last; layer++) {
            for (const part_id part : layers_[layer].parts) {
                for (uint32_t e = 0; e < layers_[layer].n_experts; e++) {
                    if (has(tier, { layer, e })) {
                        visit(expert_id{ layer, e }, part, locate(tier, layer, part, e));
                    }
                }
            }
        }
    }

    // Has no location if the embedding is also the output matrix.
    const embedding_table & embedding() const { return embedding_; }

    const std::string & architecture() const { return architecture_; }

    uint32_t width() const { return width_; } // numbers of a token between layers; 0: not known

    // The experts of layers first to last that have the tier: how many, and all their bytes.
    uint32_t n_held(tier_id tier, layer_id first = 0, layer_id last = INT32_MAX) const;
    uint64_t tier_bytes(tier_id tier, layer_id first = 0, layer_id last = INT32_MAX) const;

    uint64_t expert_bytes(expert_id id, tier_id tier) const; // 0 where the file has none. REQUIRES: a stored tier

    double token_bytes(tier_id tier) const; // bytes of a token's experts, by the means of their layers

    // A routed expert tensor under llama.cpp's name; null for any other name. Valid as long as the index.
    const expert_tensor * find_tensor(const std::string & name) const;

    const std::vector<std::string> & files() const { return files_; }

    // Sum of the model's own files (without a sidecar).
    uint64_t model_bytes() const { return model_bytes_; }

    // Settings stored in the metadata, then in a calibration beside the model.
    const stored_settings & stored() const { return stored_; }

    // Empty before read_calibration, and without a calibration.
    const hobbit::calibration & calibration() const { return calibration_; }

  private:
    using layer_locations = per_part<std::vector<part_location>>; // [part][expert]

    status add_base(const std::vector<gguf_file> & files);
    void   find_embedding(const std::vector<gguf_file> & files);
    status add_tiers(const std::vector<gguf_file> & files);
    status add_group(const gguf_file & file, uint32_t file_number, const gguf_file::tensor & tensor);
    status open_sidecar(const std::string & path, const std::string & sidecar, std::vector<gguf_file> & files) const;
    void   read_metadata(const gguf_file & file);

    std::vector<std::string>               files_;
    std::vector<layer_shape>               layers_;
    per_tier<std::vector<layer_locations>> locations_; // [tier][layer]
    tier_format                            format_;    // without a check: no further tier
    embedding_table                        embedding_;
    std::vector<std::string>               stored_keys_;
    stored_settings                        stored_;
    hobbit::calibration                    calibration_;
    std::string                            architecture_;
    uint32_t                               n_experts_used_ = 0;
    uint32_t                               width_          = 0;
    uint64_t                               model_bytes_    = 0;
};

} // namespace hobbit
