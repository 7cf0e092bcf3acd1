// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "base/system-memory.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "model/expert.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace hobbit {

// Reads a model's files. Tests replace it by fakes.
//
// Thread-safety: read_at may be called from any number of threads at once.
class file_reader {
  public:
    // The alignment of offsets, sizes and memory in read_at, which O_DIRECT needs on every common file system.
    static constexpr size_t alignment = 4096;

    virtual ~file_reader() = default;

    // Reads `size` bytes at `offset` of file number `file` into `buf`. The file may end before the range does, but not
    // within its first `needed` bytes.
    // REQUIRES: offset, size and buf are multiples of `alignment`.
    virtual status read_at(uint32_t file, uint64_t offset, size_t size, size_t needed, void * buf) = 0;
};

// Direct I/O reads whole blocks, so a part is read as the smallest aligned range of the file that contains it. This is
// where the part begins in that range.
inline size_t data_offset(const part_location & location) {
    return location.offset % file_reader::alignment;
}

// Bytes of that range.
inline size_t aligned_span(const part_location & location) {
    constexpr size_t a = file_reader::alignment;
    return (data_offset(location) + location.size + a - 1) / a * a;
}

// Bypasses the page cache where the file system allows it; elsewhere, drops from it what was read.
// If the size or modification time of an open file changes, the read during which it happens and all later ones fail.
class posix_file_reader final : public file_reader {
  public:
    ~posix_file_reader() override;

    // Files are numbered from 0 in the order of the calls. REQUIRES: no read_at has started.
    status open(const std::string & path);

    status read_at(uint32_t file, uint64_t offset, size_t size, size_t needed, void * buf) override;

    // Fails if another file has taken the place of an open one. A file that was removed is no error.
    status check_in_place() const;

    // Returns true if reads of every file bypass the page cache.
    bool direct_io() const;

  private:
    struct open_file {
        std::string       path;
        int               fd;
        std::atomic<bool> direct;
        struct stat       opened; // as it was when it was opened
    };

    static status check_unchanged(const open_file & file);

    std::vector<std::unique_ptr<open_file>> files_; // constant once reading starts
};

// The host memory from which experts are copied to these devices. Page-locked (pinned) memory lets a device copy by
// itself, at the speed of its link. It is used if the driver of one device provides it and direct I/O can read into it,
// which is tried with the reader's first file; otherwise a warning says so and ordinary memory is used.
//
// Thread-safety: as ggml's registry. REQUIRES: the reader has a file
ggml_backend_buffer_type_t find_pinned_memory(const std::vector<ggml_backend_dev_t> & devices, file_reader & reader);

// Memory of one thread that direct I/O can read into. Growing it loses its content.
class staging_buffer {
  public:
    // `lent`, at a multiple of file_reader::alignment, is used as long as it is large enough.
    explicit staging_buffer(char * lent = nullptr, size_t lent_size = 0) : lent_(lent), size_(lent_size) {}

    // Returns false if no memory is left.
    bool reserve(size_t size) {
        if (size > size_) {
            memory_.reset(
                ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size + file_reader::alignment));
            size_ = memory_ ? size : 0;
        }
        return size <= size_;
    }

    // A multiple of file_reader::alignment.
    char * data() const { return memory_ ? aligned_base(memory_.get(), file_reader::alignment) : lent_; }

  private:
    char *                  lent_;
    ggml_backend_buffer_ptr memory_; // null: lent_ is used
    size_t                  size_;
};

} // namespace hobbit
