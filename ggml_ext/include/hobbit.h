// SPDX-License-Identifier: MIT
//
// hobbit: bounded expert caches for Mixture-of-Experts models on any ggml device (HOBBIT, arXiv 2411.01433).
//
// Conventions
//   - C, opaque handles, sized integers. No exception crosses this interface. Where a function of a model or a context
//     has no `err`, its error is that of the model's next computation.
//   - A function that can fail returns false or NULL and writes one sentence, with what to do about it, to `err`
//     (truncated to `err_size`, always terminated). hobbit_last_error keeps the most recent one of the process.
//   - Sizes are bytes. Times are seconds.
//   - Every function of a model may be called from any thread; a context belongs to one thread at a time. ggml's list
//     of devices has no lock: hobbit_place_layers adds to it, so no other thread may use the list meanwhile.
//   - The cffi declarations of the Python package are generated from this file: keep declarations to plain C.

#ifndef HOBBIT_H
#define HOBBIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef HOBBIT_BUILD
#define HOBBIT_API __attribute__((visibility("default")))
#else
#define HOBBIT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The routed experts of one opened GGUF model: where they lie, their pools and their counters. Reference counted.
typedef struct hobbit_model hobbit_model;

struct ggml_backend_buffer_type;
struct ggml_backend_device;
struct ggml_backend_sched;
struct ggml_tensor;

//
// Opening
//

// One setting, by a key of hobbit_setting_spec_at. It wins over the same key in the model file.
struct hobbit_setting {
    const char * key;
    double       number; // a flag is 0 or 1
    const char * text;   // in place of the number, borrowed for the call; NULL: none
};

enum hobbit_setting_type {
    HOBBIT_TYPE_NUMBER = 0,
    HOBBIT_TYPE_COUNT  = 1, // a whole number
    HOBBIT_TYPE_SIZE   = 2, // bytes
    HOBBIT_TYPE_FLAG   = 3,
    HOBBIT_TYPE_CHOICE = 4,
    HOBBIT_TYPE_TEXT   = 5,
    HOBBIT_TYPE_PATH   = 6,
};

// Describes one setting. The command line, the Python package and the docs are generated from these.
struct hobbit_setting_spec {
    const char * key;
    const char * option; // name for users; several keys of one name are the elements of a list; NULL: not for users
    enum hobbit_setting_type type;
    double                   min; // range of a number, count or size
    double                   max;
    const char *             default_value; // as text; NULL: none, or computed
    const char *             default_note;  // for users, where default_value does not tell; NULL: none
    const char *             choices;       // separated by spaces; NULL: not a choice
    const char *             unit;          // NULL: none
    bool                     is_stored;     // a model file or its calibration may hold it
    bool                     is_live;       // a number or choice that hobbit_change_settings takes
    const char * replaced_by; // keys separated by spaces; given one of them, MODEL.toml's value does not apply
    const char * help;
};

// The i-th setting, NULL past the last one. Valid for ever.
HOBBIT_API const struct hobbit_setting_spec * hobbit_setting_spec_at(size_t i);

// The configuration of a paper. A build may lack a mechanism, and so an option or a choice that it names.
struct hobbit_paper {
    const char * name;
    const char * needs;    // beside the settings, for people
    const char * settings; // OPTION=VALUE, separated by spaces
};

// The i-th paper by name, NULL past the last one. Valid for ever.
HOBBIT_API const struct hobbit_paper * hobbit_paper_at(size_t i);

// The i-th setting that is a number of a rule for precision, by key; NULL past the last one. Valid for ever.
HOBBIT_API const struct hobbit_setting_spec * hobbit_rule_number_at(size_t i);

// The keys of the numbers by which a rule decides, separated by spaces; "" of an unknown rule. Valid for ever.
HOBBIT_API const char * hobbit_numbers_of_rule(const char * rule);

// The origin of a setting's value.
enum hobbit_setting_source {
    HOBBIT_SOURCE_DEFAULT     = 0, // the table
    HOBBIT_SOURCE_COMPUTED    = 1, // other settings; without a value: the memory and devices when the model is opened
    HOBBIT_SOURCE_FILE        = 2, // the model file
    HOBBIT_SOURCE_CALIBRATION = 3, // the calibration beside the model
    HOBBIT_SOURCE_GIVEN       = 4, // the caller
};

// The value that a setting has in the engine.
struct hobbit_resolved_setting {
    enum hobbit_setting_source source;
    bool                       has_value;  // false: it is computed later, or belongs to another policy
    double                     number;     // 0 or 1 of a flag
    char                       text[1024]; // value of a choice, text or path
    char                       note[128];  // how it was computed, or which setting overrules a stored value; "": none
};

// Resolves the settings as hobbit_open does, without opening the model; path NULL: of any model. rows: in the order of
// hobbit_setting_spec_at. Fails where hobbit_open refuses the settings; devices, files and memory are not looked at.
HOBBIT_API bool hobbit_resolve_settings(const char * path, const struct hobbit_setting * settings, size_t n_settings,
                                        struct hobbit_resolved_setting * rows, size_t n_rows, char * err,
                                        size_t err_size);

// The settings of an opened model, in the order of hobbit_setting_spec_at; without values if memory runs out.
HOBBIT_API void hobbit_get_settings(const hobbit_model * model, struct hobbit_resolved_setting * rows, size_t n_rows);

// Opens the experts of the GGUF at `path` (of a split model: its first file), without reading any weight.
// On success *model holds one reference, or NULL where llama.cpp is to load the file as it always does: a dense model,
// or a plain GGUF for which no cache was asked and which fits into free memory, or has hobbit.placement=layers.
HOBBIT_API bool hobbit_open(const char * path, const struct hobbit_setting * settings, size_t n_settings,
                            hobbit_model ** model, char * err, size_t err_size);

HOBBIT_API void hobbit_ref(hobbit_model * model);

// Drops one reference; the last one joins the loader threads and frees the pools. NULL is ignored.
HOBBIT_API void hobbit_unref(hobbit_model * model);

// The file that has the other parts of a split model beside it: `path`, or the file that it links to, over one link or
// several; `path` where there are none. Copies what fits into `first`; returns the length.
HOBBIT_API size_t hobbit_first_part(const char * path, char * first, size_t size);

// Copies the most recent error sentence of the process; returns its length, 0 when there was none.
HOBBIT_API size_t hobbit_last_error(char * err, size_t err_size);

HOBBIT_API void hobbit_clear_last_error(void);

//
// For the model loader
//

// Experts of a layer that llama.cpp runs at most.
HOBBIT_API uint32_t hobbit_max_experts(void);

// Bytes that a server's requests may take while they are read (hobbit.requests), a third for connections, for so many
// tokens of context and a limit of `memory` bytes for the process; 0: none. has_media: it takes images or sound.
HOBBIT_API uint64_t hobbit_request_bytes(uint64_t n_ctx, uint64_t memory, bool has_media);

// Returns true if the tensor belongs to a further tier, which no architecture of llama.cpp knows.
HOBBIT_API bool hobbit_is_tier_tensor(const char * name);

// Tells how many experts a token uses in each block as the model will run, whatever its metadata say. Without it all
// blocks have the largest number of the metadata. REQUIRES: before hobbit_place_layers.
HOBBIT_API void hobbit_set_experts_used(hobbit_model * model, const uint32_t * of_blocks, size_t n_blocks);

// Tells that blocks from n_blocks on are not run, such as a draft head that nobody loads: their experts have no part of
// the memory. REQUIRES: before hobbit_place_layers.
HOBBIT_API void hobbit_set_run_blocks(hobbit_model * model, uint32_t n_blocks);

// Places the experts of each block, and starts the loader threads. devices[N] has the rest of block N ("blk.N.").
// Without hobbit.device these devices are taken, where they have memory of their own and can hold experts; integrated
// GPUs are left out. Blocks of other devices, and those from n_devices on, are given to the ones taken in runs, in
// proportion to their free memory. can_repeat: false where the model's memory of a token cannot be overwritten, as in
// recurrent models; the setting `confidence` is then refused. REQUIRES: called once, before the functions below.
HOBBIT_API bool hobbit_place_layers(hobbit_model * model, struct ggml_backend_device * const * devices,
                                    size_t n_devices, bool can_repeat, char * err, size_t err_size);

// Returns true if the tensor's data stays on disk: routed experts that the cache serves, and where memory is short the
// token embedding, whose rows are read as they are looked up. The loader gives it hobbit_buffer_type and reads nothing.
HOBBIT_API bool hobbit_owns_tensor(const hobbit_model * model, const char * name);

// The buffer type of the block's weights on disk; -1: of the token embedding. Hands out addresses without memory. Valid
// while the model has a reference; every buffer of the type holds one.
HOBBIT_API struct ggml_backend_buffer_type * hobbit_buffer_type(hobbit_model * model, int32_t block);

// The buffer type of the device that computes the block's experts: for biases, which are added there. Valid for ever.
HOBBIT_API struct ggml_backend_buffer_type * hobbit_device_buffer_type(hobbit_model * model, int32_t block);

// Bytes of a snapshot of one sequence's state; 0 where a state can go back without. Memory for hobbit.snapshots of them
// is kept free of experts, see hobbit_info. REQUIRES: before hobbit_plan_pools and the first context.
HOBBIT_API void hobbit_set_snapshot_size(hobbit_model * model, uint64_t bytes);

// Why a model cannot be opened as it is planned.
enum hobbit_shortage {
    HOBBIT_SHORT_OF_NOTHING       = 0, // it can, or the reason is not memory
    HOBBIT_SHORT_OF_MEMORY        = 1, // hobbit.memory is below the smallest that works
    HOBBIT_SHORT_OF_POOLS         = 2, // hobbit.pools is
    HOBBIT_SHORT_OF_DEVICE_MEMORY = 3, // hobbit.device_memory is
    HOBBIT_SHORT_OF_FREE_MEMORY   = 4, // the host, or a device, has too little free memory
    HOBBIT_SHORT_OF_SNAPSHOTS     = 5, // hobbit.least_snapshots of them leave the pools no room
    HOBBIT_ABOVE_LIMIT            = 6, // the process may not hold as much as it is told to
};

// Memory that the first context would allocate.
struct hobbit_pool_plan {
    uint64_t             pool_bytes;     // bytes of all devices' pools, or of host memory if they are there
    uint64_t             batch_bytes;    // memory of computing beside the pools and llama.cpp's buffers
    uint64_t             prefetch_bytes; // the predictor's part of batch_bytes
    bool                 holds_all;      // the pools have room for every expert in its best precision
    enum hobbit_shortage shortage;
    uint64_t             least; // where a bound is too small: the smallest that works, in bytes
};

// Plans the pools: allocates nothing and reads nothing. Afterwards hobbit_get_info and hobbit_get_device tell the
// planned pools. Arguments and errors as of hobbit_open_context. REQUIRES: before it
HOBBIT_API bool hobbit_plan_pools(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch,
                                  struct hobbit_pool_plan * plan, char * err, size_t err_size);

// How a router's outputs become probabilities.
enum hobbit_gating {
    HOBBIT_GATING_SOFTMAX       = 1,
    HOBBIT_GATING_SIGMOID       = 2,
    HOBBIT_GATING_SQRT_SOFTPLUS = 3,
};

// The router of one block.
struct hobbit_router {
    const struct ggml_tensor * weight;         // [n_embd, n_experts] of any type that ggml converts to float
    const struct ggml_tensor * bias;           // bias of its outputs; NULL: none
    const struct ggml_tensor * selection_bias; // bias of the probabilities by which experts are chosen; NULL: none
    enum hobbit_gating         gating;
    const struct ggml_tensor * gain;   // n_embd factors that its input carries, such as those of a norm; NULL: none
    uint32_t                   n_used; // experts that it chooses; 0: as many as other routers
};

// Gives the predictor the router of a block ("blk.N."), which it copies. REQUIRES: before the first context.
HOBBIT_API bool hobbit_set_router(hobbit_model * model, uint32_t block, const struct hobbit_router * router, char * err,
                                  size_t err_size);

//
// Contexts
//

// The batches and sequences of one context of llama.cpp. A batch holds the model from hobbit_begin_batch to
// hobbit_end_batch: batches of other contexts wait for their turn, in the order in which they asked. Sequence N of the
// i-th open context is number N + 65536 * i in traces and events. A context holds a reference on its model.
typedef struct hobbit_context hobbit_context;

// The first context allocates the pools. `model_bytes`: host memory that the model takes beside them, for non-expert
// weights, KV cache and compute buffers. `n_batch`: the largest number of tokens computed at once.
// Fails when the budget is below the smallest that works, which the message states, and when hobbit.memory, which the
// first context divides, has no room for a further one. *context is then NULL.
HOBBIT_API bool hobbit_open_context(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch,
                                    hobbit_context ** context, char * err, size_t err_size);

// Computes experts in the queues of the scheduler's other backends, where one is of the same device: neither side waits
// for the other then. REQUIRES: the scheduler has computed nothing.
HOBBIT_API void hobbit_share_queues(struct ggml_backend_sched * sched);

// Ends the context's batch, and frees its memory for the next context. NULL is ignored.
HOBBIT_API void hobbit_close_context(hobbit_context * context);

// Announces the next batch, for which it waits: each token's sequence and position, and whether its logits are wanted.
// A token at position 0 begins its sequence anew. can_repeat: the caller asks hobbit_repeats_batch behind it, and can
// compute it again. Batches that are not announced are of sequence 0. REQUIRES: the thread computes what it announces.
HOBBIT_API void hobbit_begin_batch(hobbit_context * context, uint32_t n_tokens, const int32_t * sequences,
                                   const int32_t * positions, const int8_t * outputs, bool can_repeat);

// The batch is computed, or has failed: the next one may begin. Without a batch it does nothing.
HOBBIT_API void hobbit_end_batch(hobbit_context * context);

// Returns true if the batch is a draft: a sequence of it has a confidence.
HOBBIT_API bool hobbit_is_draft(const hobbit_context * context);

// Returns true if the draft that was just computed is to be computed again, because it is unsure of a token. The next
// computation is then the second pass over the batch. logits: [n_rows][n_vocab], one row for each token of the batch;
// NULL, where they are not known, repeats. Another number of rows is an error of the second pass.
HOBBIT_API bool hobbit_repeats_batch(hobbit_context * context, const float * logits, uint32_t n_rows, uint32_t n_vocab);

// Begins another text in this sequence, though its first tokens may be kept. It waits while another thread's batch
// holds the model, as computations that were not announced do; these take no turn in the order of batches.
HOBBIT_API void hobbit_begin_sequence(hobbit_context * context, int32_t sequence);

//
// Changing
//

// Changes live settings of the model (hobbit_setting_spec.is_live) from the next layer on. If one of two numbers that
// limit each other is changed alone, the other one moves where it must. Fails for a low pool that was not allocated.
HOBBIT_API bool hobbit_change_settings(hobbit_model * model, const struct hobbit_setting * changes, size_t n_changes,
                                       char * err, size_t err_size);

// Changes live settings of one sequence, until hobbit_begin_sequence; others are the model's. In a batch of several
// sequences each gets at least the precision that its own settings ask for. Fails as hobbit_change_settings does.
HOBBIT_API bool hobbit_change_sequence_settings(hobbit_context * context, int32_t sequence,
                                                const struct hobbit_setting * changes, size_t n_changes, char * err,
                                                size_t err_size);

enum { HOBBIT_MAX_RULE_NUMBERS = 8 };

// The precision of computed tokens: the value of each number that rules have, for the functions below.
struct hobbit_precision {
    double numbers[HOBBIT_MAX_RULE_NUMBERS];
};

// All high.
HOBBIT_API struct hobbit_precision hobbit_full_precision(void);

// The precision of what the sequence computes next: by its own settings, or else by the model's.
HOBBIT_API struct hobbit_precision hobbit_sequence_precision(const hobbit_context * context, int32_t sequence);

// Tells whether `a` is at least as precise as `b`.
HOBBIT_API bool hobbit_precision_covers(struct hobbit_precision a, struct hobbit_precision b);

// The best precision that both `a` and `b` cover.
HOBBIT_API struct hobbit_precision hobbit_lower_precision(struct hobbit_precision a, struct hobbit_precision b);

// Replaces what low precision and skipping cost in the rule price: nats of divergence of a use whose weight is 1, one
// number per layer, or one per layer and expert; INFINITY: never. n: of each array.
HOBBIT_API bool hobbit_set_costs(hobbit_model * model, const float * low, const float * skip, size_t n, char * err,
                                 size_t err_size);

//
// Observing
//

// Returns true if experts can be computed; false, with the reason, for ever after a computation has failed.
HOBBIT_API bool hobbit_check(const hobbit_model * model, char * err, size_t err_size);

// Seconds of the oldest read in flight; 0 without one, and before hobbit_place_layers. Never waits for a computation.
HOBBIT_API double hobbit_oldest_read(const hobbit_model * model);

#define HOBBIT_FIELD(type, name, help) type name;
#define HOBBIT_BY_TIER(type, name, help) type name##_high, name##_low;

// Figures of an opened model, those of BY_TIER for each precision. Python and the server are built from these lists.
#define HOBBIT_INFO_FIELDS(FIELD, BY_TIER)                                                                             \
    FIELD(uint32_t, n_layers, "Layers with routed experts")                                                            \
    FIELD(uint32_t, n_experts, "Experts per layer, in the largest")                                                    \
    FIELD(uint32_t, n_experts_used, "Experts that a token uses per layer, in the layer with the most")                 \
    FIELD(uint32_t, n_tiers, "Precisions in the model's files")                                                        \
    BY_TIER(uint32_t, n_absent, "Experts of all layers that have the other precision alone")                           \
    FIELD(uint32_t, n_run_layers, "Layers that are run: the first ones, without a draft head that nobody loads")       \
    FIELD(uint32_t, n_all_experts, "Experts of all layers that are run")                                               \
    FIELD(uint32_t, n_token_uses, "Experts that a token uses, in all layers that are run")                             \
    BY_TIER(uint64_t, tier_bytes, "Bytes of all routed experts on disk")                                               \
    BY_TIER(double, token_bytes, "Bytes of the experts of a token in all layers, if all have this precision")          \
    BY_TIER(uint64_t, pool_bytes, "Bytes of the expert cache; 0 before they are planned")                              \
    BY_TIER(uint32_t, pool_slots, "Experts that fit in the cache")                                                     \
    BY_TIER(uint64_t, host_bytes, "Bytes of the cache in host memory behind the cache of a GPU")                       \
    BY_TIER(uint32_t, host_slots, "Experts that fit in the cache in host memory")                                      \
    FIELD(uint64_t, snapshot_bytes, "Bytes left free for snapshots of sequences' states")

struct hobbit_info {
    HOBBIT_INFO_FIELDS(HOBBIT_FIELD, HOBBIT_BY_TIER)
    bool direct_io;     // false: the file system refused O_DIRECT
    bool on_device;     // the pools are on a device with memory of its own; false before hobbit_place_layers
    char precision[64]; // numbers by which the rule decides, such as "t1 0.6, t2 0.9"; "": all is high
};

HOBBIT_API void hobbit_get_info(const hobbit_model * model, struct hobbit_info * info);

// One of the devices that hold pools and compute experts; what is said of all of them in hobbit_info is their sum.
struct hobbit_device_info {
    const char * name;            // as ggml names it; valid for ever
    uint32_t     n_layers;        // layers with routed experts that it computes
    uint32_t     pool_slots_high; // 0 before they are planned
    uint32_t     pool_slots_low;
    uint64_t     pool_bytes_high;
    uint64_t     pool_bytes_low;
    uint64_t     bytes_transferred; // bytes copied to it, where it has memory of its own
};

// The i-th device, as hobbit.device has them; false past the last one, and before hobbit_place_layers.
HOBBIT_API bool hobbit_get_device(const hobbit_model * model, size_t i, struct hobbit_device_info * info);

// Mean times for one expert on a device with its own memory; 0 if not measured. The mode gpu measures nothing.
struct hobbit_latency {
    uint64_t expert_bytes; // bytes of an upload
    uint32_t n_tokens;     // rows of the expert: so many, or up to the next power of two
    double   cpu_s;
    double   device_s; // time of an expert in device memory
    double   upload_s;
};

// The i-th size of experts and number of tokens that a device, or the CPU beside it, computed; false past the last one.
HOBBIT_API bool hobbit_get_latency(const hobbit_model * model, size_t device, size_t i,
                                   struct hobbit_latency * latency);

enum hobbit_counter_kind {
    HOBBIT_COUNT   = 0, // a whole number that grows
    HOBBIT_SECONDS = 1, // grows
    HOBBIT_STATE   = 2, // 1 or 0 now
};

// Describes one counter. Server, Python and documents are built from these; those of one metric are neighbours.
struct hobbit_counter {
    const char *             name;
    enum hobbit_counter_kind kind;
    const char *             metric; // name in Prometheus, without the prefix "hobbit_"
    const char *             label;  // label of the metric, as in precision="high"; NULL: no label
    const char *             help;
};

// The i-th counter, NULL past the last one. Valid for ever.
HOBBIT_API const struct hobbit_counter * hobbit_counter_at(size_t i);

// The first n_values counters since opening, in the order of hobbit_counter_at; times in seconds.
HOBBIT_API void hobbit_get_counters(const hobbit_model * model, double * values, size_t n_values);

// Figures of the time between two samples of the counters. Shares are from 0 to 1. NAN: nothing of the kind happened.
#define HOBBIT_RATES_FIELDS(FIELD)                                                                                     \
    FIELD(double, tokens_per_s, "Tokens computed, those of prompts included")                                          \
    FIELD(double, hit_rate, "Share of the experts that layers needed and found in the cache")                          \
    FIELD(double, hit_rate_high, "Share of hits in high precision")                                                    \
    FIELD(double, hit_rate_low, "Share of hits in low precision")                                                      \
    FIELD(double, host_hit_rate, "Share of a GPU's misses that host memory had")                                       \
    FIELD(double, bytes_read_per_s, "Bytes of experts read from disk")                                                 \
    FIELD(double, bytes_read_per_token, "Bytes of experts read from disk")                                             \
    FIELD(double, stall_share, "Share of the time that computation waited for the disk or for an upload")              \
    FIELD(double, expert_share, "Share of the time in layers with routed experts, without these waits")                \
    FIELD(double, high_share, "Share of the selections in high precision")                                             \
    FIELD(double, low_share, "Share of the selections in low precision")                                               \
    FIELD(double, skipped_share, "Share of the selections that were skipped")                                          \
    FIELD(double, cpu_share, "Share of the selections that the CPU computed beside a GPU")

struct hobbit_rates {
    HOBBIT_RATES_FIELDS(HOBBIT_FIELD)
};

// Samples are of all counters, in the order of hobbit_counter_at. A counter that fell began anew, and counts as
// unchanged. seconds: between the samples. n_token_uses: of hobbit_info. Pure.
HOBBIT_API struct hobbit_rates hobbit_get_rates(const double * before, const double * after, double seconds,
                                                uint32_t n_token_uses);

// Hits and misses of each layer with routed experts since opening, both precisions together. n_layers: of each array.
HOBBIT_API void hobbit_get_layer_uses(const hobbit_model * model, uint64_t * hits, uint64_t * misses, size_t n_layers);

// One layer's experts for one batch, when they have been computed. Pointers are valid during the call.
struct hobbit_layer_event {
    uint32_t        layer; // among the layers with routed experts
    uint32_t        n_tokens;
    uint32_t        n_used;       // experts per token
    uint32_t        n_embd;       // width of the router's input
    const int32_t * sequences;    // [n_tokens]
    const int32_t * positions;    // [n_tokens]
    const int32_t * experts;      // [n_tokens][n_used], as the router ranked them
    const float *   weights;      // [n_tokens][n_used], as the router gave them; NULL where they are not known
    const uint8_t * precisions;   // [n_tokens][n_used]: 0 skipped, 1 low, 2 high
    const float *   router_input; // [n_tokens][n_embd], NULL where it is not known
    const float *   output_norms; // [n_tokens][n_used], Euclidean norm of each expert's output before it is weighted
};

typedef void (*hobbit_observer)(const struct hobbit_layer_event * event, void * user_data);

// Calls `observer` after every layer, on the thread that computes, but not in a second pass; NULL ends it. user_data
// must live until then. It must call no function of this model but hobbit_get_counters: they wait for the layer to end.
HOBBIT_API void hobbit_set_observer(hobbit_model * model, hobbit_observer observer, void * user_data);

//
// This machine
//

// Bytes that the process holds now.
HOBBIT_API uint64_t hobbit_resident_memory(void);

// Bytes that the process may still take without anything being swapped out or killed, by memory cgroups too.
HOBBIT_API uint64_t hobbit_available_memory(void);

// Bytes that the process could take at most: the machine's memory, or less by the limit of a memory cgroup.
HOBBIT_API uint64_t hobbit_memory_limit(void);

enum hobbit_header_fault {
    HOBBIT_HEADER_REFUSED  = 0, // damaged, or with what only other programs know
    HOBBIT_HEADER_CUT      = 1, // it goes on behind what there is
    HOBBIT_HEADER_NOT_READ = 2, // the system's error
};

// Reads and checks the header of the GGUF file `path`, or of one of `size` bytes by its first ones, where `data` is not
// NULL. Returns the bytes of the header, or 0 with the reason. ggml's log is off meanwhile, and nobody else may set it.
HOBBIT_API size_t hobbit_check_header(const char * path, const char * data, size_t n_data, uint64_t size,
                                      enum hobbit_header_fault * fault, char * err, size_t err_size);

// Refuses a bound of so many bytes that is above hobbit_memory_limit().
HOBBIT_API bool hobbit_check_limit(uint64_t memory, char * err, size_t err_size);

struct hobbit_disk_speed {
    double   bytes_per_s;
    uint64_t read_bytes; // bytes of each read: as requested, aligned, and not more than the file holds
    bool     direct_io;  // false: the file system refused reads past the page cache
};

// Reads at random places of the file for `seconds`, `n_threads` reads of `read_bytes` at a time, as the loader does.
HOBBIT_API bool hobbit_measure_disk(const char * path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                                    struct hobbit_disk_speed * speed, char * err, size_t err_size);

#ifdef __cplusplus
}
#endif

#endif // HOBBIT_H
