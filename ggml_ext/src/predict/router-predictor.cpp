// SPDX-License-Identifier: MIT
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "graph/inner-graph.h"
#include "predict/predictor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

namespace hobbit {

namespace {

// Tokens of one product: a bound on the memory that predicting for a prompt takes.
constexpr int64_t MAX_TOKENS = 128;

constexpr size_t N_TENSORS = 8; // in a context

ggml_context * new_context() {
    return ggml_init({ N_TENSORS * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_TENSORS, false), nullptr,
                       /* .no_alloc = */ true });
}

// The tensor's numbers, from any device; false where its type cannot be converted.
bool read_floats(const ggml_tensor * tensor, std::vector<float> & out) {
    const ggml_to_float_t to_float = ggml_get_type_traits(tensor->type)->to_float;
    if (!ggml_is_contiguous(tensor) || (tensor->type != GGML_TYPE_F32 && !to_float)) {
        return false;
    }
    std::vector<char> raw(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, raw.data(), 0, raw.size());
    out.resize(size_t(ggml_nelements(tensor)));
    if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(out.data(), raw.data(), raw.size());
    } else {
        to_float(raw.data(), out.data(), int64_t(out.size()));
    }
    return true;
}

// Numbers by expert; there may be none.
bool read_bias(const ggml_tensor * tensor, uint32_t n_experts, std::vector<float> & out) {
    return !tensor || (ggml_nelements(tensor) == n_experts && read_floats(tensor, out));
}

// Bytes from one row to the next; 0 where they are not evenly spaced.
size_t row_stride(const ggml_tensor * t) {
    size_t stride = t->nb[1];
    for (int i = 1, rows = 0; i < GGML_MAX_DIMS; i++) {
        if (t->ne[i] > 1 && rows++ > 0) {
            return ggml_is_contiguous(t) ? t->nb[1] : 0;
        }
        stride = t->ne[i] > 1 ? t->nb[i] : stride;
    }
    return stride;
}

void softmax(std::vector<float> & x) {
    const float max = *std::max_element(x.begin(), x.end());
    std::transform(x.begin(), x.end(), x.begin(), [&](float v) { return std::exp(v - max); });
    const float sum = std::accumulate(x.begin(), x.end(), 0.0f);
    std::transform(x.begin(), x.end(), x.begin(), [&](float v) { return v / sum; });
}

float softplus(float x) {
    return x > 20.0f ? x : std::log1p(std::exp(x));
}

void gate(std::vector<float> & x, hobbit_gating gating) {
    switch (gating) {
        case HOBBIT_GATING_SOFTMAX: softmax(x); break;
        case HOBBIT_GATING_SIGMOID:
            std::transform(x.begin(), x.end(), x.begin(), [](float v) { return 1.0f / (1.0f + std::exp(-v)); });
            break;
        case HOBBIT_GATING_SQRT_SOFTPLUS:
            std::transform(x.begin(), x.end(), x.begin(), [](float v) { return std::sqrt(softplus(v)); });
            break;
    }
}

// x + y; y may be empty.
std::vector<float> sum(const float * x, size_t n, const std::vector<float> & y) {
    std::vector<float> out(x, x + n);
    for (size_t i = 0; i < y.size(); i++) {
        out[i] += y[i];
    }
    return out;
}

// Applies the routers of the next layers to the router input of the running layer (HOBBIT, section 3.3), since one
// layer changes the residual stream little. The routers of all layers with routed experts are stacked into one matrix,
// so that one matmul covers any number of layers ahead. The gains of the norms before the routers differ between
// layers: the running layer's are divided out of its input, and each router in the stack carries its own. A router's
// first choice among groups of experts is ignored.
//
// The stacked copy takes 2 bytes x width x experts of all layers, in half precision, and the gains 4 x width x layers.
// It is read once per layer and token, and half precision has more digits than the bfloat16 that most routers were
// trained in. The product takes some further MiB at most.
class router_predictor final : public predictor {
  public:
    explicit router_predictor(const predictor_options & options) :
        options_(options),
        n_experts_(*std::max_element(options.n_experts.begin(), options.n_experts.end())),
        routers_(options.n_experts.size()),
        stack_ctx_(new_context()),
        graph_ctx_(new_context()) {}

    // A router that cannot be stacked with the first one is left out with a warning: its layer is not predicted.
    status set_router(layer_id layer, const hobbit_router & given) override {
        const ggml_tensor * weight    = given.weight;
        const uint32_t      n_experts = options_.n_experts[layer];
        router              r         = { n_experts, given.gating, given.n_used, given.gain != nullptr, {}, {} };
        std::vector<float>  floats;
        std::vector<float>  gain;
        const bool          fits =
            ggml_n_dims(weight) <= 2 && weight->ne[1] == n_experts && (!stack_ || weight->ne[0] == stack_->ne[0]) &&
            read_floats(weight, floats) && read_bias(given.bias, n_experts, r.bias) &&
            read_bias(given.selection_bias, n_experts, r.selection_bias) &&
            (!r.has_gain || (ggml_nelements(given.gain) == weight->ne[0] && read_floats(given.gain, gain)));
        if (!fits) {
            GGML_LOG_WARN("hobbit: the router '%s' (%lld x %lld, %s) cannot be used to predict: no prefetch for its "
                          "layer\n",
                          weight->name, (long long) weight->ne[0], (long long) weight->ne[1],
                          ggml_type_name(weight->type));
            return {};
        }
        if (!stack_) {
            HOBBIT_TRY(make_stack(weight->ne[0]));
        }
        if (r.has_gain) {
            for (size_t i = 0; i < floats.size(); i++) {
                floats[i] *= gain[i % gain.size()];
            }
            // a gain of zero hides its input for good
            std::transform(gain.begin(), gain.end(), gain.begin(), [](float g) { return g == 0.0f ? 0.0f : 1.0f / g; });
            ggml_backend_tensor_set(inverse_, gain.data(), size_t(layer) * inverse_->nb[1], inverse_->nb[1]);
        }
        std::vector<ggml_fp16_t> halves(floats.size());
        ggml_fp32_to_fp16_row(floats.data(), halves.data(), int64_t(floats.size()));
        ggml_backend_tensor_set(stack_, halves.data(), size_t(layer) * n_experts_ * stack_->nb[1],
                                halves.size() * sizeof(ggml_fp16_t));
        routers_[layer] = std::move(r);
        return {};
    }

    size_t bytes() const override {
        const size_t row = size_t(n_experts_) * sizeof(ggml_fp16_t) + sizeof(float); // copies and gains
        return stack_buffer_ ? ggml_backend_buffer_get_size(stack_buffer_.get())
                             : row * routers_.size() * options_.width;
    }

    bool knows(layer_id layer) const override { return routers_[layer].n_experts > 0; }

    // Rows of floats that are as wide as the routers.
    bool accepts(const ggml_tensor * router_input) const override {
        return stack_ && router_input && router_input->type == GGML_TYPE_F32 && router_input->ne[0] == stack_->ne[0] &&
               router_input->nb[0] == sizeof(float) && row_stride(router_input) > 0;
    }

    const ggml_tensor * begin(layer_id running, uint32_t n_ahead, const ggml_tensor * router_input,
                              ggml_backend_t backend) override {
        const size_t  n_layers = count_known(running, n_ahead);
        const int64_t n_tokens = ggml_nrows(router_input);
        is_begun_              = false;
        if (n_layers == 0 || n_tokens > MAX_TOKENS ||
            !build(backend, router_input, 0, n_tokens, running, n_layers).ok() ||
            ggml_backend_graph_compute_async(backend, graph_) != GGML_STATUS_SUCCESS) {
            return nullptr; // predict() says why
        }
        begun_ = running;
        return product_;
    }

    void end(const char * bytes) override {
        outputs_.resize(size_t(ggml_nelements(product_)));
        std::memcpy(outputs_.data(), bytes, ggml_nbytes(product_));
        is_begun_ = true;
    }

    status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor * router_input,
                   ggml_backend_t backend, std::vector<layer_routing> & predictions) override {
        GGML_ASSERT(accepts(router_input));
        const int64_t n_tokens = ggml_nrows(router_input);
        const size_t  n_layers = count_known(running.layer, n_ahead);
        predictions.clear();
        for (layer_id l(running.layer + 1); predictions.size() < n_layers; l++) {
            const router & r      = routers_[l];
            const int64_t  n_used = std::min<int64_t>(r.n_used > 0 ? r.n_used : running.n_used, r.n_experts);
            predictions.push_back({ l, n_tokens, n_used, {}, {} });
        }

        for (int64_t first = 0; n_layers > 0 && first < n_tokens; first += MAX_TOKENS) {
            const int64_t n = std::min(MAX_TOKENS, n_tokens - first);
            HOBBIT_TRY(multiply(backend, router_input, first, n, running.layer, n_layers));
            for (size_t i = 0; i < size_t(n) * n_layers; i++) {
                layer_routing & to  = predictions[i % n_layers];
                const size_t    row = i / n_layers * (n_own_ + n_layers) + n_own_ + i % n_layers;
                choose(routers_[to.layer], &outputs_[row * n_experts_], to);
            }
        }
        std::for_each(predictions.begin(), predictions.end(), normalize);
        return {};
    }

    status rank(const layer_routing & running, const ggml_tensor * router_input, ggml_backend_t backend,
                std::vector<int32_t> & ranking) override {
        const int64_t  n_tokens = ggml_nrows(router_input);
        const router & r        = routers_[running.layer];
        ranking.clear();
        if (r.n_experts == 0 || n_tokens > MAX_TOKENS) {
            return {};
        }
        if (!is_begun_ || begun_ != running.layer || n_own_ == 0) {
            n_own_    = 1;
            is_begun_ = false;
            HOBBIT_TRY(multiply(backend, router_input, 0, n_tokens, running.layer, 0));
        }
        layer_routing all = { running.layer, n_tokens, r.n_experts, {}, {} };
        for (size_t t = 0; t < size_t(n_tokens); t++) {
            choose(r, &outputs_[t * (outputs_.size() / size_t(n_tokens))], all);
        }
        ranking = std::move(all.experts);
        return {};
    }

  private:
    struct router {
        uint32_t           n_experts = 0; // 0: not known
        hobbit_gating      gating    = HOBBIT_GATING_SOFTMAX;
        uint32_t           n_used    = 0; // 0: as many as the running layer
        bool               has_gain  = false;
        std::vector<float> bias;           // empty: none
        std::vector<float> selection_bias; // empty: none
    };

    status make_stack(int64_t width) {
        stack_   = ggml_new_tensor_2d(stack_ctx_.get(), GGML_TYPE_F16, width, int64_t(routers_.size()) * n_experts_);
        inverse_ = ggml_new_tensor_2d(stack_ctx_.get(), GGML_TYPE_F32, width, int64_t(routers_.size()));
        stack_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(stack_ctx_.get(), options_.memory));
        if (!stack_buffer_) {
            const size_t size = ggml_nbytes(stack_);
            stack_            = nullptr;
            ggml_reset(stack_ctx_.get());
            return status::error("no memory for a copy of the routers (%s): switch prefetch off (hobbit.prefetch 0)",
                                 format_size(double(size)).c_str());
        }
        ggml_backend_buffer_clear(stack_buffer_.get(), 0);
        return {};
    }

    bool reserve(ggml_backend_t backend, size_t size) {
        if (!scratch_ || size > ggml_backend_buffer_get_size(scratch_.get())) {
            scratch_.reset(); // frees it before the larger one is allocated
            scratch_.reset(ggml_backend_alloc_buffer(backend, size));
        }
        return scratch_ != nullptr;
    }

    status build(ggml_backend_t backend, const ggml_tensor * router_input, int64_t first, int64_t n_tokens,
                 layer_id running, size_t n_layers) {
        ggml_context * ctx = graph_ctx_.get();
        ggml_reset(ctx);
        const size_t  stride  = row_stride(router_input);
        const size_t  row     = (size_t(running) + 1 - n_own_) * n_experts_;
        const int64_t n_rows  = int64_t(n_own_ + n_layers) * n_experts_;
        ggml_tensor * weights = rows_at(ctx, stack_->type, stack_->ne[0], n_rows, stack_->nb[1],
                                        static_cast<char *>(stack_->data) + row * stack_->nb[1], stack_buffer_.get());
        ggml_tensor * input =
            rows_at(ctx, GGML_TYPE_F32, router_input->ne[0], n_tokens, stride,
                    static_cast<char *>(router_input->data) + size_t(first) * stride, root_of(router_input)->buffer);
        const bool has_gain = routers_[running].has_gain;
        if (has_gain) {
            input =
                ggml_mul(ctx, input,
                         rows_at(ctx, GGML_TYPE_F32, input->ne[0], 1, inverse_->nb[1],
                                 static_cast<char *>(inverse_->data) + running * inverse_->nb[1], stack_buffer_.get()));
        }
        product_                  = ggml_mul_mat(ctx, weights, input);
        const size_t product_size = GGML_PAD(ggml_nbytes(product_), ggml_backend_get_alignment(backend));
        if (!reserve(backend, product_size + (has_gain ? ggml_nbytes(input) : 0))) {
            return status::error("%s has no memory to predict experts: switch prefetch off (hobbit.prefetch 0)",
                                 ggml_backend_name(backend));
        }
        product_->data   = ggml_backend_buffer_get_base(scratch_.get());
        product_->buffer = scratch_.get();
        if (has_gain) {
            input->data   = static_cast<char *>(product_->data) + product_size;
            input->buffer = scratch_.get();
        }

        graph_ = ggml_new_graph_custom(ctx, N_TENSORS, false);
        ggml_build_forward_expand(graph_, product_);
        return {};
    }

    status multiply(ggml_backend_t backend, const ggml_tensor * router_input, int64_t first, int64_t n_tokens,
                    layer_id running, size_t n_layers) {
        if (std::exchange(is_begun_, false) && begun_ == running &&
            ggml_nelements(product_) == n_tokens * int64_t(n_own_ + n_layers) * n_experts_) {
            return {};
        }
        HOBBIT_TRY(build(backend, router_input, first, n_tokens, running, n_layers));
        const ggml_status result = ggml_backend_graph_compute(backend, graph_);
        if (result == GGML_STATUS_ABORTED) {
            return status::aborted();
        }
        if (result != GGML_STATUS_SUCCESS) {
            return status::error("%s failed to predict experts (%s)", ggml_backend_name(backend),
                                 ggml_status_to_string(result));
        }
        outputs_.resize(size_t(ggml_nelements(product_)));
        ggml_backend_tensor_get(product_, outputs_.data(), 0, ggml_nbytes(product_));
        return {};
    }

    // One token's choice of experts by a router with these outputs. Weights are not normalised.
    static void choose(const router & r, const float * outputs, layer_routing & to) {
        std::vector<float> p = sum(outputs, r.n_experts, r.bias);
        gate(p, r.gating);
        for (const int32_t e : top_k(sum(p.data(), p.size(), r.selection_bias), size_t(to.n_used))) {
            to.experts.push_back(e);
            to.weights.push_back(p[size_t(e)]);
        }
    }

    // The layers of n_ahead that are known, up to the first one that is not.
    size_t count_known(layer_id running, uint32_t n_ahead) const {
        size_t n = 0;
        while (n < n_ahead && running + 1 + n < routers_.size() && knows(layer_id(uint32_t(running + 1 + n)))) {
            n++;
        }
        return n;
    }

    const predictor_options options_;
    const uint32_t          n_experts_; // rows of each router in the stack
    std::vector<router>     routers_;   // [layer]

    ggml_context_ptr        stack_ctx_;
    ggml_tensor *           stack_   = nullptr; // [width, n_layers * n_experts]; null before the first router
    ggml_tensor *           inverse_ = nullptr; // [width, n_layers], of the gains
    ggml_backend_buffer_ptr stack_buffer_;
    ggml_context_ptr        graph_ctx_;
    ggml_backend_buffer_ptr scratch_;           // holds the product
    ggml_cgraph *           graph_   = nullptr; // in graph_ctx_, of the product
    ggml_tensor *           product_ = nullptr; // in graph_ctx_
    std::vector<float>      outputs_;           // the product: [token][layer][expert], the n_own_ running ones first
    layer_id                begun_;             // the running layer of the product that begin() has begun
    bool                    is_begun_ = false;  // outputs_ are those of begun_
    size_t                  n_own_    = 0;      // 1: the product begins with the running layer, which is ranked
};

const auto maker = registered_predictor::of<router_predictor>("router", { "asks the next layers' routers" });

} // namespace

} // namespace hobbit
