// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "cache/expert-cache.h"
#include "ggml-cpp.h"
#include "graph/expert-matmul.h"
#include "graph/inner-graph.h"
#include "graph/routing.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"

#include <cstdint>
#include <map>
#include <vector>

namespace hobbit {

// The rows of a layer that the CPU computes from experts in host memory. The outer graph's operations are repeated on
// these rows alone, which are contiguous in host memory. Inputs are copied to host memory. Only results that nothing in
// the section reads are copied back.
//
// Thread-safety: none.
class cpu_rows {
  public:
    // Both must outlive the object; the cache is in host memory.
    cpu_rows(const expert_index & index, const expert_cache & cache) : products_(index, cache) {}

    // Returns true if the rows of every tensor that the section computes are independent of each other.
    static bool can_share(const layer_section & section, const layer_routing & routing);

    // The tensors with rows that the section's nodes read and do not compute.
    static std::vector<const ggml_tensor *> inputs_of(const std::vector<const ggml_tensor *> & nodes);

    // Copies the inputs of the section's nodes but for `known`. REQUIRES: can_share, and the device has computed these
    // inputs. The uses belong to the layer. Nodes and routing must live until copy_back.
    void begin(std::vector<const ggml_tensor *> nodes, const layer_routing & routing,
               const std::vector<const planned_use *> & uses, const host_copy & known, inner_graph & device);

    // The rows of the outer tensors. REQUIRES: begin
    const std::vector<int32_t> & all() const { return rows_; }

    // Experts that are computed together: the uses [first, end) of begin(), and their rows.
    struct piece {
        size_t first;
        size_t end;
        size_t first_row;
        size_t n_rows;
    };

    // The next piece, with enough rows for an efficient operation: uploads are served between two pieces.
    piece next() const;
    bool  is_done() const { return next_use_ == uses_.size(); }

    // REQUIRES: begin, and not is_done(); the experts of next() are pinned and resident.
    status compute_next(inner_graph & cpu);

    // compute_next in two steps: adds operations to the graph, and keeps their rows once the caller has computed it.
    status begin_next(inner_graph & cpu);
    void   end_next();

    // Takes the rows of the first uses from `other` as far as it has them, instead of computing them. Returns of how
    // many uses. REQUIRES: begin; both are of sections alike for one token, and other.is_done()
    size_t adopt(const cpu_rows & other);

    // Returns true if begin() got the use.
    bool has(const planned_use & use) const { return find(use) < uses_.size(); }

    // Starts copies of the rows to the outer graph, behind what the device was given before. REQUIRES: is_done()
    status copy_back(inner_graph & device);

    // Bytes of host memory for n_rows rows of any layer, of which at most n_at_once are computed together.
    static uint64_t size(const expert_index & index, uint64_t n_rows, uint64_t n_at_once);

  private:
    // The rows of one computed tensor that is read later.
    struct result {
        const ggml_tensor * outer;
        std::vector<float>  values; // [row][ne0], in the order of rows_
    };

    void   fetch(const host_copy & known, inner_graph & device);
    size_t find(const planned_use & use) const;
    void   fill(const ggml_tensor * outer, ggml_tensor * copy, const piece & p);
    void   keep_results(const piece & p);

    const expert_matmuls products_;

    std::vector<const ggml_tensor *> nodes_; // nodes of the section, without no-ops
    const layer_routing *            routing_ = nullptr;
    std::vector<planned_use>         uses_;
    size_t                           next_use_ = 0;
    size_t                           next_row_ = 0;
    std::vector<int32_t>             rows_; // rows of the outer tensors, in the order of uses_
    std::vector<result>              results_;

    std::map<const ggml_tensor *, std::vector<char>> inputs_; // host copies

    // the tensors of the current piece
    row_copies              copies_;
    ggml_backend_buffer_ptr memory_;
};

} // namespace hobbit
