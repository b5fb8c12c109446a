// SlabArray: one atomic per block of every slab, where slabs hold different numbers of blocks at different times.
//
// Owns zeroed memory that the system commits page by page, as it is first written. Elements lie in levels of doubling size: the first
// `base` elements of all slabs stand together, then elements [base, 2*base) of all slabs, and so on. A slab of few large blocks so
// costs a few elements, although the next owner of the slab may cut it into thousands.
// Thread-safe as its elements are; allocates in the constructor only; never blocks.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/lazy_array.h"

namespace hetkv {

template <class T>
class SlabArray {
 public:
  static_assert(std::atomic<T>::is_always_lock_free && sizeof(std::atomic<T>) == sizeof(T));

  // least and most: the smallest and largest number of elements that any owner of a slab uses, 1 or more.
  SlabArray(std::uint32_t slabs, std::uint32_t least, std::uint32_t most)
      : slabs_(slabs), base_(std::bit_ceil(least)), data_(std::size_t{slabs} * std::bit_ceil(most)) {}

  std::atomic<T>& at(std::uint32_t slab, std::uint32_t i) const noexcept {
    if (i < base_) return data_[std::size_t{slab} * base_ + i];
    const std::size_t level = std::bit_floor(i);  // elements [level, 2*level) of all slabs, behind the slabs_*level lower ones
    return data_[(std::size_t{slabs_} + slab) * level + (i - level)];
  }
  // Bytes that a slab which has held up to `count` elements uses.
  std::uint64_t bytes(std::uint32_t count) const noexcept { return sizeof(T) * (count <= base_ ? base_ : std::bit_ceil(count)); }

 private:
  std::uint32_t slabs_, base_;
  LazyArray<std::atomic<T>> data_;
};

}  // namespace hetkv
