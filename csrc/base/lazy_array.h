// A zero-filled array whose pages the kernel supplies on first touch: capacity is virtual, memory is what was used.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace hetkv {

// T must be valid when all its bytes are zero and need no destructor. Elements never move. Not copyable.
template <class T>
class LazyArray {
 public:
  LazyArray() = default;
  explicit LazyArray(std::size_t count) : count_(count) {
    if (count == 0) return;
    void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    // Random access over large tables: huge pages save a page walk per look-up. Only advice.
    if (count * sizeof(T) >= (std::size_t{64} << 20)) madvise(memory, count * sizeof(T), MADV_HUGEPAGE);
    data_ = static_cast<T*>(memory);
  }
  LazyArray(LazyArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  LazyArray& operator=(LazyArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~LazyArray() {
    if (data_ != nullptr) munmap(static_cast<void*>(data_), count_ * sizeof(T));
  }

  T& operator[](std::size_t i) const { return data_[i]; }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace hetkv
