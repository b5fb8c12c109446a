#include "bindings/bind_allocator.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bind_sequence.h"
#include "bindings/refuse.h"
#include "bindings/sequence_handle.h"
#include "bindings/token_array.h"

namespace py = pybind11;
using namespace py::literals;

namespace hetkv {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using AllocatorPtr = std::shared_ptr<KvAllocator>;

// A namespace of one allocator, which it keeps alive.
struct NamespaceHandle {
  AllocatorPtr allocator;
  Namespace* space = nullptr;
  std::vector<std::pair<std::string, std::string>> fields;
};

// A pinned prefix, and the allocator that it needs. Not thread-safe by itself: used with the GIL held.
struct PinnedPrefixHandle {
  AllocatorPtr allocator;  // first: ends last
  std::unique_ptr<PinnedPrefix> prefix;
};

Namespace* space_of(const KvAllocator& allocator, const NamespaceHandle& handle) {
  if (handle.allocator.get() != &allocator) throw ArgumentError("namespace", "one of another cache", "a namespace of this cache");
  return handle.space;
}

ObjectKind kind_from_name(const std::string& name) {
  for (std::size_t i = 0; i < kNumKinds; ++i)
    if (kind_name(static_cast<ObjectKind>(i)) == name) return static_cast<ObjectKind>(i);
  throw ArgumentError("kind", "'" + name + "'", "a kind of objects, such as 'full_kv'");
}

LossReason reason_from_name(const std::string& name) {
  for (std::size_t i = 0; i < kNumLossReasons; ++i)
    if (loss_reason_name(static_cast<LossReason>(i)) == name) return static_cast<LossReason>(i);
  throw ArgumentError("reason", "'" + name + "'", "a reason for a loss, such as 'checksum'");
}

GroupId group_id(const KvAllocator& allocator, std::int64_t group) {
  const auto count = allocator.layout().groups().size();
  if (group < 0 || group >= static_cast<std::int64_t>(count))
    throw ArgumentError("group", std::to_string(group), "an id below " + std::to_string(count));
  return static_cast<GroupId>(group);
}

void set_limits(ArenaConfig& arena, const std::map<std::string, std::uint32_t>& floors,
                const std::map<std::string, std::uint64_t>& caps) {
  for (const auto& [kind, slabs] : floors) arena.limits[static_cast<std::size_t>(kind_from_name(kind))].floor_slabs = slabs;
  for (const auto& [kind, cap] : caps) arena.limits[static_cast<std::size_t>(kind_from_name(kind))].cap_bytes = cap;
}

HostTierConfig host_config(const py::dict& d) {
  HostTierConfig config;
  config.arena.bytes = d["bytes"].cast<std::uint64_t>();
  config.arena.base_address = d["base_address"].cast<std::uint64_t>();
  config.arena.slab_bytes = d["slab_bytes"].cast<std::uint64_t>();
  config.max_nodes = d["max_nodes"].cast<std::uint32_t>();
  set_limits(config.arena, d["floors"].cast<std::map<std::string, std::uint32_t>>(),
             d["caps"].cast<std::map<std::string, std::uint64_t>>());
  config.spill = SpillPolicy::parse(d["write"].cast<std::string>(), d["retention"].cast<std::string>());
  return config;
}

DiskTierConfig disk_config(const py::dict& d) {
  DiskTierConfig config;
  config.directory.path = d["path"].cast<std::string>();
  config.directory.capacity_bytes = d["capacity"].cast<std::uint64_t>();
  config.directory.direct = d["direct"].cast<bool>();
  const auto sync = d["fsync"].cast<std::string>();
  if (sync == "none") {
    config.directory.sync = DiskConfig::Sync::kNone;
  } else if (sync == "data") {
    config.directory.sync = DiskConfig::Sync::kData;
  } else if (sync == "full") {
    config.directory.sync = DiskConfig::Sync::kDataAndDirectory;
  } else {
    throw ArgumentError("fsync", "'" + sync + "'", "'none', 'data' or 'full'");
  }
  const auto compression = d["compression"].cast<std::optional<std::string>>();
  if (compression && *compression != "zstd") throw ArgumentError("compression", "'" + *compression + "'", "None or 'zstd'");
  config.directory.codec = compression ? Codec::kZstd : Codec::kNone;
  config.spill = SpillPolicy::parse(d["write"].cast<std::string>(), d["retention"].cast<std::string>());
  config.load_threads = d["load_threads"].cast<std::size_t>();
  config.store_threads = d["store_threads"].cast<std::size_t>();
  return config;
}

// Ends the allocator, whose threads may still call into Python, and only then lets go of the memory that they use.
AllocatorPtr hold(std::unique_ptr<KvAllocator> allocator, const py::object& memory) {
  const auto end = [memory = new py::object(memory)](KvAllocator* it) {
    if (PyGILState_Check() != 0) {
      const py::gil_scoped_release release;
      delete it;
    } else {
      delete it;
    }
    const py::gil_scoped_acquire gil;
    delete memory;
  };
  return AllocatorPtr(allocator.release(), end);
}

AllocatorPtr make_allocator(const CacheLayout& layout, std::uint64_t bytes, std::uint64_t base_address, std::uint64_t slab_bytes,
                            const std::map<std::string, std::uint32_t>& floors, const std::map<std::string, std::uint64_t>& caps,
                            const std::string& retention, bool verify_all_tokens, const std::string& model_version,
                            const std::map<std::string, std::uint64_t>& abi, std::uint64_t hash_seed, bool lock_free,
                            std::uint32_t max_nodes, std::uint64_t pin_prefix_cap_bytes, const std::optional<py::dict>& host,
                            const std::optional<py::dict>& disk, const py::object& memory) {
  AllocatorConfig config;
  if (host) config.lower.host = host_config(*host);
  if (disk) config.lower.disk = disk_config(*disk);
  config.arena.bytes = bytes;
  config.arena.base_address = base_address;
  config.arena.slab_bytes = slab_bytes;
  config.arena.lock_free = lock_free;
  set_limits(config.arena, floors, caps);
  config.retention = RetentionPolicy::parse(retention);
  config.verify_all_tokens = verify_all_tokens;
  config.model_version = model_version;
  config.abi = abi;
  config.hash_seed = hash_seed;
  config.max_nodes = max_nodes;
  config.pin_prefix_cap_bytes = pin_prefix_cap_bytes;
  std::unique_ptr<KvAllocator> allocator;
  {
    const py::gil_scoped_release release;
    allocator = std::make_unique<KvAllocator>(layout, config);
  }
  return hold(std::move(allocator), memory);
}

NamespaceHandle make_namespace(const AllocatorPtr& self, std::vector<std::pair<std::string, std::string>> fields) {
  std::vector<NamespaceField> tagged;
  for (const auto& [tag, value] : fields) tagged.push_back({tag, value});
  return {self, self->space(tagged), std::move(fields)};
}

py::tuple probe(KvAllocator& self, const TokenArray& tokens, const NamespaceHandle& space, const HashedPrefix* previous) {
  const auto ids = token_span(tokens, "tokens");
  const Namespace* where = space_of(self, space);
  const HitReport report = [&] {
    const py::gil_scoped_release release;
    return self.probe(ids, where, previous);
  }();
  return report_tuple(report, self.layout(), true);
}

std::unique_ptr<SequenceHandle> admit(const AllocatorPtr& self, const TokenArray& tokens, const NamespaceHandle& space,
                                      std::int64_t max_new_tokens, std::int64_t chunk_tokens, bool live_state,
                                      std::shared_ptr<HashedPrefix> previous, bool restore) {
  const auto ids = token_span(tokens, "tokens");
  Namespace* where = space_of(*self, space);
  const AdmitOptions options{max_new_tokens, chunk_tokens, live_state, std::move(previous), restore};
  const py::gil_scoped_release release;
  AdmitResult result = self->admit(ids, where, options);
  throw_if_refused(result.refusal, self->layout(), "admit");
  return std::make_unique<SequenceHandle>(self, std::move(result.sequence));
}

std::unique_ptr<PinnedPrefixHandle> pin_prefix(const AllocatorPtr& self, const TokenArray& tokens, const NamespaceHandle& space) {
  const auto ids = token_span(tokens, "tokens");
  Namespace* where = space_of(*self, space);
  const py::gil_scoped_release release;
  auto handle = std::make_unique<PinnedPrefixHandle>();
  handle->allocator = self;
  handle->prefix = self->pin_prefix(ids, where);
  return handle;
}

std::vector<StepStamp> prepare_step(KvAllocator& self, const std::vector<SequenceHandle*>& sequences,
                                    const std::vector<std::int64_t>& num_tokens, const StepArrays& arrays,
                                    std::optional<std::size_t> padded_sequences, std::optional<std::size_t> padded_tokens) {
  if (sequences.size() != num_tokens.size())
    throw ArgumentError("num_tokens", std::to_string(num_tokens.size()) + " numbers", std::to_string(sequences.size()));
  StepBuffers buffers = arrays.buffers;
  buffers.padded_sequences = padded_sequences.value_or(buffers.padded_sequences);
  buffers.padded_tokens = padded_tokens.value_or(buffers.padded_tokens);
  if (buffers.padded_sequences > arrays.buffers.padded_sequences)
    throw ArgumentError("padded_sequences", std::to_string(buffers.padded_sequences),
                        "at most the buffers' " + std::to_string(arrays.buffers.padded_sequences));
  if (buffers.padded_tokens > arrays.buffers.padded_tokens)
    throw ArgumentError("padded_tokens", std::to_string(buffers.padded_tokens),
                        "at most the buffers' " + std::to_string(arrays.buffers.padded_tokens));
  auto sorted = sequences;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    throw ArgumentError("sequences", "one sequence twice", "every sequence once");

  std::vector<SequenceHandle::Use> uses;
  std::vector<StepItem> items;
  uses.reserve(sequences.size());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i]->allocator().get() != &self)
      throw ArgumentError("sequences", "one of another cache", "sequences of this cache");
    uses.emplace_back(*sequences[i]);
    items.push_back({uses.back().get(), num_tokens[i]});
  }
  std::vector<StepStamp> stamps(items.size());
  throw_if_refused(self.prepare_step(items, buffers, stamps.data()), self.layout(), "prepare_step");
  return stamps;
}

void bind_handles(py::module_& m) {
  py::class_<NamespaceHandle>(m, "Namespace", "Who may share with whom: a handle of one allocator.")
      .def_property_readonly(
          "fields",
          [](const NamespaceHandle& n) {
            py::tuple result(n.fields.size());
            for (std::size_t i = 0; i < n.fields.size(); ++i)
              result[i] = py::make_tuple(n.fields[i].first, py::bytes(n.fields[i].second));
            return result;
          },
          "((tag, value as bytes), ...)")
      .def_property_readonly(
          "used_bytes", [](const NamespaceHandle& n) { return n.space->used_bytes.load(std::memory_order_relaxed); },
          "Bytes of its sequences' blocks and of its objects.")
      .def("__eq__",
           [](const NamespaceHandle& a, const py::object& b) {
             return py::isinstance<NamespaceHandle>(b) && a.space == b.cast<NamespaceHandle&>().space;
           })
      .def("__hash__", [](const NamespaceHandle& n) { return std::hash<const void*>{}(n.space); })
      .def("__repr__", [](const NamespaceHandle& n) {
        std::string text = "<Namespace";
        for (const auto& [tag, value] : n.fields) text += " " + tag + "=" + py::repr(py::bytes(value)).cast<std::string>();
        return text + ">";
      });

  py::class_<PinnedPrefixHandle>(m, "PinnedPrefix", "A prefix that stays until release(), also a context manager.")
      .def_property_readonly("num_tokens", [](const PinnedPrefixHandle& p) { return p.prefix->num_tokens(); })
      .def_property_readonly("bytes", [](const PinnedPrefixHandle& p) { return p.prefix->bytes(); })
      .def(
          "release", [](PinnedPrefixHandle& p) { p.prefix->release(); }, "Idempotent.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](PinnedPrefixHandle& p, const py::args&) { p.prefix->release(); })
      .def("__repr__",
           [](const PinnedPrefixHandle& p) { return "<PinnedPrefix of " + std::to_string(p.prefix->num_tokens()) + " tokens>"; });
}

}  // namespace

void bind_allocator(py::module_& m) {
  bind_handles(m);
  m.def(
      "loss_reasons",
      [] {
        py::tuple names(kNumLossReasons);
        for (std::size_t i = 0; i < kNumLossReasons; ++i)
          names[i] = py::str(std::string(loss_reason_name(static_cast<LossReason>(i))));
        return names;
      },
      "Names of the reasons for lost tokens, in order.");

  py::class_<KvAllocator, AllocatorPtr>(m, "Allocator", "The facade of the core. Thread-safe. Tokens: contiguous int32 arrays.")
      .def(
          py::init(&make_allocator), "layout"_a, "bytes"_a, py::kw_only(), "base_address"_a = 0, "slab_bytes"_a = 0,
          "floors"_a = std::map<std::string, std::uint32_t>{}, "caps"_a = std::map<std::string, std::uint64_t>{},
          "retention"_a = "adaptive", "verify_all_tokens"_a = true, "model_version"_a = "0",
          "abi"_a = std::map<std::string, std::uint64_t>{}, "hash_seed"_a = 0, "lock_free"_a = true, "max_nodes"_a = 0,
          "pin_prefix_cap_bytes"_a = 0, "host"_a = py::none(), "disk"_a = py::none(), "memory"_a = py::none(),
          "host, disk: the tiers below, as dicts (python/hetkv/tiers.py); memory: kept until the allocator's threads have ended.")
      .def("layout", &KvAllocator::layout, py::return_value_policy::reference_internal)
      .def("retention", [](const KvAllocator& a) { return a.retention().to_string(); })
      .def("namespace_", &make_namespace, "fields"_a, "fields: [(tag, value)].")
      .def("set_model_version", &KvAllocator::set_model_version, "name"_a, NoGil())
      .def("model_version", [](KvAllocator& a) { return a.versions().at(a.versions().current()).model_name; })
      .def(
          "version", [](KvAllocator& a) { return a.versions().current(); }, "Id of the running version.")
      .def("set_abi", &KvAllocator::set_abi, "family"_a, "value"_a, NoGil())
      .def("abi", [](KvAllocator& a) { return a.versions().abi(); })
      .def("declare_alignment", &KvAllocator::declare_alignment, "family"_a, "bytes"_a, NoGil())
      .def(
          "set_quota", [](KvAllocator& a, const NamespaceHandle& n, std::uint64_t bytes) { a.set_quota(space_of(a, n), bytes); },
          "namespace"_a, "bytes"_a)
      .def(
          "clear", [](KvAllocator& a, const NamespaceHandle& n) { return a.clear(space_of(a, n)); }, "namespace"_a, NoGil())
      .def("probe", &probe, "tokens"_a.noconvert(), "namespace"_a, "previous"_a = py::none())
      .def("admit", &admit, "tokens"_a.noconvert(), "namespace"_a, "max_new_tokens"_a = 0, "chunk_tokens"_a = 0,
           "live_state"_a = false, "previous"_a = py::none(), "restore"_a = true,
           "The sequence may wait for a restore: see Sequence.ready.")
      .def("flush", &KvAllocator::flush, NoGil(), "Waits until what was published is copied to the tiers below.")
      .def("pin_prefix", &pin_prefix, "tokens"_a.noconvert(), "namespace"_a)
      .def("prepare_step", &prepare_step, "sequences"_a, "num_tokens"_a, "arrays"_a, "padded_sequences"_a = py::none(),
           "padded_tokens"_a = py::none(), NoGil())
      .def("bytes_for", &KvAllocator::bytes_for, "tokens"_a, "chunk"_a, "live_state"_a = false, NoGil())
      .def(
          "evict",
          [](KvAllocator& a, const std::string& kind, std::uint64_t blocks) { return a.evict(kind_from_name(kind), blocks); },
          "kind"_a, "blocks"_a, NoGil())
      .def(
          "evict_object",
          [](KvAllocator& a, const TokenArray& tokens, const NamespaceHandle& n, std::int64_t position, std::int64_t group) {
            const auto ids = token_span(tokens, "tokens");
            const py::gil_scoped_release release;
            return a.evict_object(ids, space_of(a, n), position, group_id(a, group));
          },
          "tokens"_a.noconvert(), "namespace"_a, "position"_a, "group"_a)
      .def(
          "quarantine",
          [](KvAllocator& a, const TokenArray& tokens, const NamespaceHandle& n, std::int64_t position, std::int64_t group,
             const std::string& reason) {
            const auto ids = token_span(tokens, "tokens");
            const py::gil_scoped_release release;
            return a.quarantine(ids, space_of(a, n), position, group_id(a, group), reason_from_name(reason));
          },
          "tokens"_a.noconvert(), "namespace"_a, "position"_a, "group"_a, "reason"_a)
      .def(
          "scratch",
          [](const KvAllocator& a, std::int64_t pool) {
            const auto count = a.layout().pools().size();
            if (pool < 0 || pool >= static_cast<std::int64_t>(count))
              throw ArgumentError("pool", std::to_string(pool), "an id below " + std::to_string(count));
            return a.scratch(static_cast<PoolId>(pool));
          },
          "pool"_a, "Offset of the pool's scratch block, in units of 256 bytes.")
      .def("arena_bytes", [](KvAllocator& a) { return a.arena().bytes(); })
      .def("slab_bytes", [](KvAllocator& a) { return a.arena().slab_bytes(); })
      .def("stats", &allocator_stats)
      .def("check_invariants", &KvAllocator::check_invariants, NoGil(), "At quiescent moments: aborts with the broken rule.");
}

}  // namespace hetkv
