// SPDX-License-Identifier: MIT
//
// Damaged files of every format, opened through hobbit.h in this process: an index whose ranges lie within their files,
// or an error; never a crash.
//
//   fuzz-files N [SEED]   opens N mutants of each format and prints how many were opened and refused
//
// `make fuzz` builds it with libFuzzer's main(); the first byte of an input is then the number of its format.
#include "fixtures/fingerprint.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "hobbit.h"
#include "model/expert-index.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace hobbit;

static void log_nothing(ggml_log_level, const char *, void *) {}

namespace {

// A kind of file: where it lies, a good one, and the model that is opened then. The other files are good.
struct file_format {
    const char * name;
    std::string  path;
    std::string  seed;
    std::string  model;
};

class fuzzed_files {
  public:
    fuzzed_files() {
        setenv("TMPDIR", "/dev/shm", 0);
        dir_ = std::make_unique<temp_dir>();
        ggml_log_set(log_nothing, nullptr);
        make("model", "model.gguf", add_grouped_model);
        if (registered_format::traits("3").check) { // else such a file is refused
            make("partial", "partial.gguf",
                 [](gguf_builder & file) { moe_model().add_low_and_partial(file, { { 1, 3 }, { 0, 1, 2, 3 } }); });
        }
        make("calibration", "c.calibration.gguf", calibration, base("c.gguf"));
        make("sidecar", "s.hobbit.gguf", [&](gguf_builder & file) { sidecar(file, base("s.gguf")); }, base("s.gguf"));
        make("first part", "p-00001-of-00002.gguf", [](gguf_builder & file) { part(file, 0); });
        make(
            "second part", "p-00002-of-00002.gguf", [](gguf_builder & file) { part(file, 1); },
            dir_->path("p-00001-of-00002.gguf"));
    }

    const std::vector<file_format> & formats() const { return formats_; }

    // Returns true if it was opened. Ends the process if what was opened is unsound.
    bool open(const file_format & f, const std::string & bytes) {
        dir_->write(std::filesystem::path(f.path).filename().string(), bytes);
        const hobbit_setting enable   = { "hobbit.enable", 1.0, nullptr };
        char                 err[512] = "";
        hobbit_model *       model    = nullptr;
        const bool           ok       = hobbit_open(f.model.c_str(), &enable, 1, &model, err, sizeof(err));
        hobbit_unref(model);
        if (ok && model) {
            check_sound(f.model);
        } else if (!ok && err[0] == 0) {
            fail("an error without a sentence");
        }
        dir_->write(std::filesystem::path(f.path).filename().string(), f.seed);
        return ok;
    }

  private:
    [[noreturn]] static void fail(const char * what) {
        fprintf(stderr, "fuzz-files: %s\n", what);
        abort();
    }

    static void check_sound(const std::string & path) {
        expert_index index;
        if (!index.open(path, "").ok()) {
            fail("a model that was opened cannot be opened again");
        }
        for (const tier_id tier : index.tiers()) {
            for (layer_id layer = 0; layer < index.n_layers(); layer++) {
                for (const part_id part : index.layer(layer).parts) {
                    for (uint32_t e = 0; e < index.layer(layer).n_experts; e++) {
                        check_range(index, tier, { layer, e }, part);
                    }
                }
            }
        }
    }

    static void check_range(const expert_index & index, tier_id tier, expert_id id, part_id part) {
        if (!index.has(tier, id)) {
            return;
        }
        const part_location & at   = index.locate(tier, id.layer, part, id.expert);
        const uint64_t        size = std::filesystem::file_size(index.files().at(at.file));
        const matrix_shape &  m    = index.layer(id.layer).shapes[part];
        if (at.offset > size || at.size > size - at.offset ||
            at.size != ggml_row_size(at.type, m.n_in) * uint64_t(m.n_out)) {
            fail("an expert lies outside its file");
        }
    }

    void make(const char * name, const std::string & file, const std::function<void(gguf_builder &)> & fill,
              const std::string & model = "") {
        gguf_builder built(64);
        fill(built);
        const std::string path = built.write(dir_->path(file));
        formats_.push_back({ name, path, temp_dir::read(path), model.empty() ? path : model });
    }

    // A plain model, made once.
    std::string base(const std::string & name) {
        const std::string path = dir_->path(name);
        if (!std::filesystem::exists(path)) {
            gguf_builder file;
            moe_model().add_high(file);
            file.write(path);
        }
        return path;
    }

    static void calibration(gguf_builder & file) {
        gguf_builder plain;
        temp_dir     dir;
        moe_model().add_high(plain);
        const uint64_t size = std::filesystem::file_size(plain.write(dir.path("m.gguf")));
        gguf_set_val_u64(file.keys(), "hobbit.model_bytes", size);
        gguf_set_val_f64(file.keys(), "hobbit.prefetch", 1);
        gguf_set_val_str(file.keys(), "hobbit.policy", "lfu");
        file.set_ints("hobbit.expert_uses", { 0, 5, 2, 0, 5, 0, 0, 9 });
        file.set_ints("hobbit.paths", { 1, 9, 0, 0, 1, 256 * 3 + 9, 1, 4, 1, 0, 2, 2, 0 + 4, 256 * 3 + 1 });
    }

    static void sidecar(gguf_builder & file, const std::string & base) {
        gguf_builder plain;
        moe_model().add_high(plain);
        moe_model().add_low(file);
        gguf_set_val_str(file.keys(), "general.architecture", "hobbit-sidecar");
        gguf_set_val_bool(file.keys(), "hobbit.sidecar", true);
        gguf_set_val_str(file.keys(), "hobbit.sidecar.base_name", "s.gguf");
        gguf_set_val_u64(file.keys(), "hobbit.sidecar.base_size", std::filesystem::file_size(base));
        gguf_set_val_u64(file.keys(), "hobbit.sidecar.base_fingerprint", fingerprint(tensors_of(plain, 2)));
    }

    static void part(gguf_builder & file, uint16_t number) {
        moe_model model;
        model.n_layers = 1;
        gguf_set_val_u16(file.keys(), "split.count", 2);
        gguf_set_val_u16(file.keys(), "split.no", number);
        if (number == 0) {
            model.add_high(file);
            return;
        }
        model.first_block = 1;
        model.add_tensors(file, model.high, "");
    }

    static std::string beside(const std::string & model, const std::string & suffix) {
        return model.substr(0, model.size() - std::string(".gguf").size()) + suffix;
    }

    std::unique_ptr<temp_dir> dir_;
    std::vector<file_format>  formats_;
};

// Changes of a header that its readers may miss.
class mutator {
  public:
    explicit mutator(uint32_t seed) : random_(seed) {}

    std::string operator()(const std::string & good) {
        std::string               bytes  = good;
        const size_t              header = std::min(good.size(), size_t(8192));
        const std::vector<size_t> places = places_of(good, header);
        for (uint32_t n = 1 + random_() % 3; n > 0 && !bytes.empty(); n--) {
            const size_t at = random_() % 2 && !places.empty() ? places[random_() % places.size()] : random_() % header;
            change(bytes, std::min(at, bytes.size() - 1));
        }
        return bytes;
    }

  private:
    // Offsets of numbers: lengths of texts, and the values after texts.
    static std::vector<size_t> places_of(const std::string & bytes, size_t header) {
        std::vector<size_t> places = { 4, 8, 16 };
        for (size_t at = 24; at + 8 < header; at++) {
            uint64_t length = 0;
            memcpy(&length, bytes.data() + at, 8);
            if (length >= 3 && length < 64 && at + 8 + length + 24 < bytes.size() &&
                std::all_of(
                    bytes.begin() + ptrdiff_t(at) + 8, bytes.begin() + ptrdiff_t(at + 8 + length),
                    [](char c) { return c > 32 && c < 127; })) {
                const size_t end = at + 8 + length;
                places.insert(places.end(), { at, end, end + 4, end + 8, end + 12, end + 20 });
            }
        }
        return places;
    }

    void change(std::string & bytes, size_t at) {
        static constexpr uint64_t numbers[] = { 0,          1,          2,          3,          4,     8,          9,
                                                31,         63,         64,         255,        65535, 1ull << 31, ~0u,
                                                1ull << 32, 1ull << 40, 1ull << 62, 1ull << 63, ~0ull, ~0ull - 63 };
        const uint64_t            number    = numbers[random_() % std::size(numbers)];
        const size_t              width     = 1u << random_() % 4;
        switch (random_() % 8) {
            case 0:  bytes.resize(at); break;
            case 1:  bytes.erase(at, width); break;
            case 2:  bytes.insert(at, bytes.substr(at, 1 + random_() % 64)); break;
            case 3:  bytes[at] = char(random_()); break;
            case 4:  bytes[at] = char(bytes[at] ^ (1 << random_() % 8)); break;
            default: bytes.replace(at, width, reinterpret_cast<const char *>(&number), width); break;
        }
    }

    std::mt19937 random_;
};

} // namespace

static fuzzed_files & all_files() {
    static auto & files = *new fuzzed_files;
    return files;
}

#ifdef HOBBIT_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const auto & formats = all_files().formats();
    if (size > 0) {
        all_files().open(formats[data[0] % formats.size()], { reinterpret_cast<const char *>(data) + 1, size - 1 });
    }
    return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

// Its own changes, or ours; an input that is no file yet becomes a good one.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned int seed) {
    const auto & formats = all_files().formats();
    if (size > 64 && seed % 2) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    const size_t      number = size > 0 ? data[0] % formats.size() : seed % formats.size();
    const std::string good =
        size > 64 ? std::string(reinterpret_cast<char *>(data) + 1, size - 1) : formats[number].seed;
    const std::string bytes = char(number) + mutator(seed)(good).substr(0, max_size - 1);
    memcpy(data, bytes.data(), bytes.size());
    return bytes.size();
}

#else

int main(int argc, char ** argv) {
    const int64_t  n    = argc > 1 ? atoll(argv[1]) : 3000;
    const uint32_t seed = argc > 2 ? uint32_t(atoll(argv[2])) : 1;
    for (const file_format & f : all_files().formats()) {
        int64_t n_opened = 0;
        if (!all_files().open(f, f.seed)) {
            fprintf(stderr, "fuzz-files: the good file of '%s' is refused\n", f.name);
            return 1;
        }
        mutator change(seed);
        for (int64_t i = 0; i < n; i++) {
            n_opened += all_files().open(f, change(f.seed));
        }
        printf("%-12s %9" PRId64 " mutants: %9" PRId64 " opened, %9" PRId64 " refused\n", f.name, n, n_opened,
               n - n_opened);
        fflush(stdout);
        if (n_opened == 0) {
            fprintf(stderr, "fuzz-files: the mutants of '%s' test nothing\n", f.name);
            return 1;
        }
    }
}

#endif
