// Namespaces: who may share with whom. Interned by exact comparison of tagged, length-framed fields.
//
// Owns one record per namespace for the life of the allocator. clear() gives a namespace a new instance: another root key and
// another id inside nodes, so that its old entries stop matching at once and are reclaimed later.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/hash.h"

namespace hetkv {

struct NamespaceField {
  std::string tag, value;  // ("salt", ...), ("adapter", ...), ("digest:0", ...)
};

struct NamespaceInstance {
  std::uint32_t id = 0;  // stored in nodes; never reused
  Key128 root;
};

// How often a namespace was cleared, where that outlives the process. Thread-safe; may block.
class NamespaceGenerations {
 public:
  virtual ~NamespaceGenerations() = default;
  virtual std::uint32_t generation(std::string_view framed) = 0;
  virtual std::uint32_t raise_generation(std::string_view framed) = 0;  // returns the new one
};

class Namespace {
 public:
  std::string framed;
  std::uint32_t generation = 0;  // guarded by the table
  std::atomic<std::uint64_t> quota_bytes{~std::uint64_t{0}};
  std::atomic<std::int64_t> used_bytes{0};  // blocks of its sequences and of its objects
  std::atomic<const NamespaceInstance*> instance{nullptr};
};

class NamespaceTable {
 public:
  // generations: remembers what was cleared; null: nothing outlives the table. Both must outlive it.
  explicit NamespaceTable(const ChainHasher& hasher, NamespaceGenerations* generations = nullptr)
      : hasher_(hasher), generations_(generations) {}

  // Interns; equal fields give the same pointer, valid for the table's life. Thread-safe; allocates; takes a mutex.
  Namespace* intern(const std::vector<NamespaceField>& fields);
  // A new instance of the namespace. Thread-safe; allocates; takes a mutex.
  void renew(Namespace* space);
  // The namespace that an instance id found in a node belongs to; lock-free.
  // Null only for a reader without a pin, who met an id of a record that serves anew and has not seen its namespace yet.
  Namespace* of_instance(std::uint32_t id) const {
    const Instance* chunk = owners_[id / kChunk].load(std::memory_order_acquire);
    return chunk == nullptr ? nullptr : chunk[id % kChunk].space.load(std::memory_order_acquire);
  }
  // 32 bits of its root key: what an instance is called on disk. Lock-free; of an id that was given out.
  std::uint32_t tag_of_instance(std::uint32_t id) const {
    return owners_[id / kChunk].load(std::memory_order_acquire)[id % kChunk].tag.load(std::memory_order_acquire);
  }

 private:
  static constexpr std::uint32_t kChunk = 1024, kMaxChunks = 4096;
  void add_instance_locked(Namespace* space);

  const ChainHasher& hasher_;
  NamespaceGenerations* const generations_;
  std::mutex change_;
  std::unordered_map<std::string, std::unique_ptr<Namespace>> spaces_;
  std::vector<std::unique_ptr<NamespaceInstance>> instances_;
  struct Instance {
    std::atomic<Namespace*> space{nullptr};
    std::atomic<std::uint32_t> tag{0};
  };
  std::vector<std::unique_ptr<Instance[]>> owner_chunks_;
  std::array<std::atomic<Instance*>, kMaxChunks> owners_{};
};

}  // namespace hetkv
