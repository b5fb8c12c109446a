#include "bindings/bind_layout.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "allocator/layout.h"

namespace py = pybind11;
using namespace py::literals;

namespace hetkv {

namespace {

// Python names a group by its name or by its id.
using GroupKey = std::variant<std::int64_t, std::string>;

const Group& group_of(const CacheLayout& layout, const GroupKey& key) {
  if (const auto* name = std::get_if<std::string>(&key)) {
    if (const Group* group = layout.find_group(*name)) return *group;
    throw ArgumentError("group", "'" + *name + "'", "the name of one of the layout's groups");
  }
  const std::int64_t id = std::get<std::int64_t>(key);
  if (id < 0 || id >= static_cast<std::int64_t>(layout.groups().size()))
    throw ArgumentError("group", std::to_string(id), "an id below " + std::to_string(layout.groups().size()));
  return layout.group(static_cast<GroupId>(id));
}

// A tuple of references that keep `owner` alive.
template <typename Range>
py::tuple borrowed_tuple(const Range& range, const py::object& owner) {
  py::tuple result(range.size());
  std::size_t i = 0;
  for (const auto& item : range) result[i++] = py::cast(&item, py::return_value_policy::reference_internal, owner);
  return result;
}

py::tuple group_names(const CacheLayout& layout, std::span<const GroupId> ids) {
  py::tuple result(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) result[i] = py::str(layout.group(ids[i]).spec.name);
  return result;
}

void bind_enums(py::module_& m) {
  py::native_enum<DType>(m, "DType", "enum.Enum", "Element types, as torch spells them.")
      .value("float64", DType::kFloat64)
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float8_e4m3fn", DType::kFloat8E4M3)
      .value("uint8", DType::kUInt8)
      .value("int8", DType::kInt8)
      .value("int32", DType::kInt32)
      .value("int64", DType::kInt64)
      .finalize();
  py::native_enum<Retention>(m, "Retention", "enum.Enum", "Which rows a group needs to resume at a position.")
      .value("history", Retention::kHistory)
      .value("window", Retention::kWindow)
      .value("tail", Retention::kTail)
      .value("snapshot", Retention::kSnapshot)
      .finalize();
  py::native_enum<ObjectKind>(m, "ObjectKind", "enum.Enum", "What a cache object is; decides which operations are legal.")
      .value("full_kv", ObjectKind::kFullKv)
      .value("compressed_kv", ObjectKind::kCompressedKv)
      .value("uncompressed_tail", ObjectKind::kUncompressedTail)
      .value("swa_window", ObjectKind::kSwaWindow)
      .value("indexer_state", ObjectKind::kIndexerState)
      .value("recurrent_state", ObjectKind::kRecurrentState)
      .value("disk_prefix", ObjectKind::kDiskPrefix)
      .finalize();
}

void bind_specs(py::module_& m) {
  py::class_<FieldSpec>(m, "FieldSpec", "One array of a block: rows of `shape` values.")
      .def(py::init([](std::string name, DType dtype, std::vector<std::uint32_t> shape, bool overlap) {
             return FieldSpec{std::move(name), dtype, std::move(shape), overlap};
           }),
           "name"_a, "dtype"_a, "shape"_a, py::kw_only(), "overlap"_a = false,
           "`shape` is that of one row. `overlap`: the field of a tail group that holds the overlap rows, not the tail rows.")
      .def_readonly("name", &FieldSpec::name)
      .def_readonly("dtype", &FieldSpec::dtype)
      .def_property_readonly("shape", [](const FieldSpec& f) { return py::tuple(py::cast(f.shape)); })
      .def_readonly("overlap", &FieldSpec::overlap)
      .def("__repr__", [](const FieldSpec& f) {
        return py::str("FieldSpec({!r}, DType.{}, {!r}, overlap={!r})")
            .format(f.name, std::string(dtype_name(f.dtype)), py::tuple(py::cast(f.shape)), f.overlap);
      });

  py::class_<GroupSpec>(m, "GroupSpec", "A cache group as the model describes it; CacheLayout.build() checks it.")
      .def(py::init([](std::string name, ObjectKind kind, Retention retention, std::vector<std::uint32_t> owner_layers,
                       std::vector<FieldSpec> fields, std::uint32_t compress_ratio, std::uint32_t window,
                       std::uint32_t overlap_rows, std::vector<std::uint32_t> reader_layers,
                       std::vector<std::uint32_t> layer_windows, std::uint32_t alignment, std::string indexes, bool optional) {
             GroupSpec g;
             g.name = std::move(name);
             g.kind = kind;
             g.retention = retention;
             g.compress_ratio = compress_ratio;
             g.window = window;
             g.overlap_rows = overlap_rows;
             g.owner_layers = std::move(owner_layers);
             g.reader_layers = std::move(reader_layers);
             g.layer_windows = std::move(layer_windows);
             g.fields = std::move(fields);
             g.alignment = alignment;
             g.indexes = std::move(indexes);
             g.optional = optional;
             return g;
           }),
           "name"_a, "kind"_a, "retention"_a, py::kw_only(), "owner_layers"_a, "fields"_a, "compress_ratio"_a = 1, "window"_a = 0,
           "overlap_rows"_a = 0, "reader_layers"_a = std::vector<std::uint32_t>{},
           "layer_windows"_a = std::vector<std::uint32_t>{}, "alignment"_a = 16, "indexes"_a = "", "optional"_a = false,
           "compress_ratio: tokens per entry. window: tokens, counting the query. overlap_rows: half rows of the last closed\n"
           "window (tail groups). reader_layers: empty means the owners. layer_windows: one per owner layer, all equal to "
           "window.\n"
           "alignment: bytes, a power of two. indexes: name of the group that it indexes. optional: draft or MTP state.")
      .def_readonly("name", &GroupSpec::name)
      .def_readonly("kind", &GroupSpec::kind)
      .def_readonly("retention", &GroupSpec::retention)
      .def_readonly("compress_ratio", &GroupSpec::compress_ratio)
      .def_readonly("window", &GroupSpec::window)
      .def_readonly("overlap_rows", &GroupSpec::overlap_rows)
      .def_property_readonly("owner_layers", [](const GroupSpec& g) { return py::tuple(py::cast(g.owner_layers)); })
      .def_property_readonly("reader_layers", [](const GroupSpec& g) { return py::tuple(py::cast(g.reader_layers)); })
      .def_property_readonly("layer_windows", [](const GroupSpec& g) { return py::tuple(py::cast(g.layer_windows)); })
      .def_property_readonly("fields",
                             [](const py::object& self) { return borrowed_tuple(self.cast<GroupSpec&>().fields, self); })
      .def_readonly("alignment", &GroupSpec::alignment)
      .def_readonly("indexes", &GroupSpec::indexes)
      .def_readonly("optional", &GroupSpec::optional)
      .def("__repr__", [](const GroupSpec& g) {
        return "<GroupSpec '" + g.name + "' " + std::string(kind_name(g.kind)) + " " + std::string(retention_name(g.retention)) +
               " of " + std::to_string(g.owner_layers.size()) + " layers>";
      });
}

void bind_derived(py::module_& m) {
  py::class_<Field>(m, "Field", "A field as it lies in a block. Offsets in bytes from the start of a layer's part.")
      .def_readonly("spec", &Field::spec)
      .def_property_readonly("name", [](const Field& f) { return f.spec.name; })
      .def_property_readonly("dtype", [](const Field& f) { return f.spec.dtype; })
      .def_property_readonly("shape", [](const Field& f) { return py::tuple(py::cast(f.spec.shape)); })
      .def_property_readonly("overlap", [](const Field& f) { return f.spec.overlap; })
      .def_readonly("row_bytes", &Field::row_bytes)
      .def_readonly("rows_per_block", &Field::rows_per_block, "A power of two; 0 where no node ends inside a window.")
      .def_readonly("section_offset", &Field::section_offset)
      .def_readonly("ring_rows", &Field::ring_rows)
      .def_readonly("ring_section_offset", &Field::ring_section_offset)
      .def("__repr__", [](const Field& f) { return "<Field '" + f.spec.name + "' x" + std::to_string(f.rows_per_block) + ">"; });

  py::class_<Group>(m, "Group", "A cache group with everything that the layout derives for it. Sizes in bytes.")
      .def_readonly("spec", &Group::spec)
      .def_readonly("id", &Group::id)
      .def_property_readonly("name", [](const Group& g) { return g.spec.name; })
      .def_property_readonly("kind", [](const Group& g) { return g.spec.kind; })
      .def_property_readonly("retention", [](const Group& g) { return g.spec.retention; })
      .def_property_readonly("compress_ratio", [](const Group& g) { return g.spec.compress_ratio; })
      .def_property_readonly("layers", [](const Group& g) { return py::tuple(py::cast(g.spec.owner_layers)); })
      .def_readonly("entries_per_block", &Group::entries_per_block)
      .def_readonly("layer_stride", &Group::layer_stride)
      .def_readonly("block_bytes", &Group::block_bytes)
      .def_readonly("ring_entries", &Group::ring_entries)
      .def_readonly("ring_layer_stride", &Group::ring_layer_stride)
      .def_readonly("ring_block_bytes", &Group::ring_block_bytes)
      .def_readonly("history_slot", &Group::history_slot)
      .def_readonly("point_slot", &Group::point_slot)
      .def_property_readonly("fields", [](const py::object& self) { return borrowed_tuple(self.cast<Group&>().fields, self); })
      .def(
          "field",
          [](const Group& g, const std::string& name) -> const Field& {
            for (const Field& field : g.fields)
              if (field.spec.name == name) return field;
            throw ArgumentError("field", "'" + name + "'", "the name of a field of group '" + g.spec.name + "'");
          },
          "name"_a, py::return_value_policy::reference_internal, "The field of that name; ArgumentError if there is none.")
      .def("__repr__", [](const Group& g) {
        return "<Group '" + g.spec.name + "' " + std::string(kind_name(g.spec.kind)) + ", " + std::to_string(g.block_bytes) +
               " bytes a block>";
      });

  py::class_<PoolSpec>(m, "PoolSpec", "A free set of equal blocks: one per group, then one per tail group for running rings.")
      .def_readonly("name", &PoolSpec::name)
      .def_readonly("kind", &PoolSpec::kind)
      .def_readonly("group", &PoolSpec::group)
      .def_readonly("ring", &PoolSpec::ring)
      .def_readonly("block_bytes", &PoolSpec::block_bytes)
      .def("__repr__",
           [](const PoolSpec& p) { return "<PoolSpec '" + p.name + "', " + std::to_string(p.block_bytes) + " bytes a block>"; });

  py::class_<RowRange>(m, "RowRange", "What R(p) asks of one group: rows [begin, end) in the group's own rows, and overlap rows.")
      .def_readonly("begin", &RowRange::begin)
      .def_readonly("end", &RowRange::end)
      .def_readonly("overlap_rows", &RowRange::overlap_rows)
      .def_readonly("snapshot", &RowRange::snapshot)
      .def_property_readonly("empty", &RowRange::empty)
      .def("__repr__", [](const RowRange& r) {
        return "RowRange(" + std::to_string(r.begin) + ", " + std::to_string(r.end) +
               ", overlap_rows=" + std::to_string(r.overlap_rows) + ", snapshot=" + (r.snapshot ? "True)" : "False)");
      });

  py::class_<Fingerprint>(m, "Fingerprint", "128 bits over tagged, length-framed facts.")
      .def(py::init<std::uint64_t, std::uint64_t>(), "high"_a = 0, "low"_a = 0)
      .def_readonly("high", &Fingerprint::high)
      .def_readonly("low", &Fingerprint::low)
      .def("hex", &Fingerprint::hex, "32 lower-case digits.")
      .def("__eq__", [](const Fingerprint& a,
                        const py::object& b) { return py::isinstance<Fingerprint>(b) && a == b.cast<Fingerprint&>(); })
      .def("__hash__", [](const Fingerprint& f) { return py::hash(py::make_tuple(f.high, f.low)); })
      .def("__repr__", [](const Fingerprint& f) { return "<Fingerprint " + f.hex() + ">"; });
}

}  // namespace

void bind_layout(py::module_& m) {
  bind_enums(m);
  bind_specs(m);
  bind_derived(m);

  m.def("dtype_bytes", &dtype_bytes, "dtype"_a, "Bytes of one element.");
  m.def("dtype_from_name", &dtype_from_name, "name"_a, "The DType that torch spells so; ArgumentError if unknown.");
  m.def(
      "refuse_layout",
      [](std::string group, std::string field, const std::string& why) -> py::typing::NoReturn {
        throw LayoutError(std::move(group), std::move(field), why);
      },
      "group"_a, "field"_a, "why"_a, "Raises LayoutError, for Python code that builds layouts.");

  py::class_<CacheLayout>(m, "CacheLayout", "The groups of a model's cache, their bytes, and R(p). Immutable.")
      .def_static("build", &CacheLayout::build, "model"_a, "block_size"_a, "groups"_a,
                  "Validates the groups and derives their geometry. LayoutError names the group and the field that is wrong.")
      .def_property_readonly("model", &CacheLayout::model)
      .def_property_readonly("block_size", &CacheLayout::block_size, "Tokens per block: a power of two.")
      .def_property_readonly("groups",
                             [](const py::object& self) { return borrowed_tuple(self.cast<CacheLayout&>().groups(), self); })
      .def_property_readonly("pools",
                             [](const py::object& self) { return borrowed_tuple(self.cast<CacheLayout&>().pools(), self); })
      .def("group", &group_of, "group"_a, py::return_value_policy::reference_internal,
           "By name or id; ArgumentError if there is none.")
      .def(
          "__contains__", [](const CacheLayout& l, const std::string& name) { return l.find_group(name) != nullptr; }, "name"_a)
      .def_property_readonly(
          "history_groups", [](const CacheLayout& l) { return group_names(l, l.history_groups()); }, "Required history groups.")
      .def_property_readonly(
          "point_groups", [](const CacheLayout& l) { return group_names(l, l.point_groups()); },
          "Windows, then tails, then snapshots.")
      .def(
          "ring_pool", [](const CacheLayout& l, const GroupKey& key) { return l.ring_pool(group_of(l, key).id); }, "group"_a,
          "Id of the pool of a tail group's rings, else None.")
      .def(
          "need", [](const CacheLayout& l, const GroupKey& key, std::int64_t p) { return l.need(group_of(l, key).id, p); },
          "group"_a, "p"_a, "R(p): the rows that the group needs so that the next token computed is p.")
      .def(
          "history_block_at",
          [](const CacheLayout& l, const GroupKey& key, std::uint32_t depth) {
            return l.history_block_at(group_of(l, key).id, depth);
          },
          "group"_a, "depth"_a, "Whether the node that ends at depth * block_size tokens stores a block of this history group.")
      .def(
          "window_nodes",
          [](const CacheLayout& l, const GroupKey& key, std::uint32_t depth) {
            return l.window_nodes(group_of(l, key).id, depth);
          },
          "group"_a, "depth"_a, "Number of trailing nodes whose window block R(depth * block_size) asks for.")
      .def(
          "point_needed",
          [](const CacheLayout& l, const GroupKey& key, std::uint32_t depth) {
            return l.point_needed(group_of(l, key).id, depth);
          },
          "group"_a, "depth"_a, "Whether R(depth * block_size) asks for the group's object at that node.")
      .def_property_readonly("fingerprint", &CacheLayout::fingerprint)
      .def("with_alignment", &CacheLayout::with_alignment, "group"_a, "alignment"_a,
           "The same layout with one group's alignment (bytes) changed. LayoutError if impossible.")
      .def("describe", &CacheLayout::describe, "A table, one line per group.")
      .def("__repr__", [](const CacheLayout& l) {
        return "<CacheLayout '" + l.model() + "', " + std::to_string(l.groups().size()) + " groups, block_size " +
               std::to_string(l.block_size()) + ">";
      });
}

}  // namespace hetkv
