#include "bindings/bind_sequence.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/refuse.h"
#include "bindings/sequence_handle.h"
#include "bindings/token_array.h"

namespace py = pybind11;
using namespace py::literals;

namespace hetkv {

namespace {

using Use = SequenceHandle::Use;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Int32Array = py::array_t<std::int32_t, py::array::c_style>;
using Int64Array = py::array_t<std::int64_t, py::array::c_style>;

GroupId group_id(const SequenceHandle& self, std::int64_t group) {
  const auto count = self.allocator()->layout().groups().size();
  if (group < 0 || group >= static_cast<std::int64_t>(count))
    throw ArgumentError("group", std::to_string(group), "an id below " + std::to_string(count));
  return static_cast<GroupId>(group);
}

std::optional<std::int64_t> block_or_none(std::int64_t block) { return block < 0 ? std::nullopt : std::optional(block); }

using SlotFill = void (Sequence::*)(GroupId, std::int64_t, std::int64_t, std::int64_t*) const;

// The range is checked here too, so that a huge one is refused before anything is allocated for it.
Int64Array slots(SequenceHandle& self, std::int64_t group, std::int64_t begin, std::int64_t end, SlotFill fill, bool of_tokens) {
  const GroupId id = group_id(self, group);
  const Use use(self);
  const std::int64_t rows =
      static_cast<std::int64_t>(use->block_table(id).size()) * self.allocator()->layout().group(id).entries_per_block;
  const std::int64_t limit = of_tokens ? use->scheduled() : rows;
  if (begin < 0 || begin > end || end > limit)
    throw ArgumentError(
        "range", "[" + std::to_string(begin) + ", " + std::to_string(end) + ")",
        std::string(of_tokens ? "scheduled tokens" : "rows that have blocks") + ": [0, " + std::to_string(limit) + ")");
  Int64Array result(end - begin);
  (use.get()->*fill)(id, begin, end, result.mutable_data());
  return result;
}

// The model's name, and the fingerprint that tells two versions of one name apart.
std::string version_text(const Version& version, const Version& other) {
  if (version.model_name != other.model_name) return version.model_name;
  if (version.abi != other.abi) return version.model_name + ", abi " + version.abi.hex();
  return version.model_name + ", layout " + version.layout.hex();
}

void check_version(SequenceHandle& self) {
  const Use use(self);
  const VersionTable& versions = self.allocator()->versions();
  const VersionId running = versions.current();
  if (use->version() == running) return;
  const Version &mine = versions.at(use->version()), &now = versions.at(running);
  throw StaleVersionError(version_text(mine, now), version_text(now, mine));
}

// All proofs first, then all commits.
void commit_point(SequenceHandle& self, std::int64_t position, const std::vector<std::pair<std::int64_t, std::int64_t>>& proofs) {
  const Use use(self);
  const CacheLayout& layout = self.allocator()->layout();
  for (const auto& [group, state_position] : proofs) {
    const GroupId id = group_id(self, group);
    if (state_position != position) throw PositionError(layout.group(id).spec.name, position, state_position);
  }
  for (const auto& [group, state_position] : proofs) use->commit_point(position, static_cast<GroupId>(group), state_position);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_to_clear(SequenceHandle& self) {
  const Use use(self);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> result;
  for (const ClearRange& range : use->ranges_to_clear()) result.emplace_back(range.offset, range.offset + range.bytes);
  return result;
}

template <class T>
T* writable(py::array_t<T, py::array::c_style>& array, const std::string& name, py::ssize_t dimensions) {
  if (array.ndim() != dimensions)
    throw ArgumentError(name, std::to_string(array.ndim()) + " dimensions", std::to_string(dimensions));
  if (!array.writeable()) throw ArgumentError(name, "a read-only array", "a writeable array");
  return array.mutable_data();
}

void expect_size(const std::string& name, py::ssize_t have, std::size_t want) {
  if (static_cast<std::size_t>(have) != want) throw ArgumentError(name, std::to_string(have), std::to_string(want));
}

using GroupArrays = std::map<std::int64_t, std::pair<Int32Array, Int64Array>>;

std::unique_ptr<StepArrays> make_step_arrays(const GroupArrays& groups, Int32Array cu_seqlens_q, Int32Array seqused_k,
                                             std::size_t max_tokens) {
  auto arrays = std::make_unique<StepArrays>();
  StepBuffers& b = arrays->buffers;
  b.seqused_k = writable(seqused_k, "seqused_k", 1);
  b.padded_sequences = static_cast<std::size_t>(seqused_k.size());
  b.padded_tokens = max_tokens;
  b.cu_seqlens_q = writable(cu_seqlens_q, "cu_seqlens_q", 1);
  expect_size("cu_seqlens_q.size", cu_seqlens_q.size(), b.padded_sequences + 1);
  for (const auto& [id, pair] : groups) {
    if (id < 0 || id >= static_cast<std::int64_t>(kMaxGroups)) throw ArgumentError("group", std::to_string(id), "a group's id");
    auto [table, group_slots] = pair;
    const std::string prefix = "group " + std::to_string(id) + " ";
    StepBuffers::GroupArrays& g = b.groups[static_cast<std::size_t>(id)];
    g.block_table = writable(table, prefix + "block table", 2);
    expect_size(prefix + "block table rows", table.shape(0), b.padded_sequences);
    g.table_stride = static_cast<std::size_t>(table.shape(1));
    g.slots = writable(group_slots, prefix + "slots", 1);
    expect_size(prefix + "slots", group_slots.size(), max_tokens);
    arrays->keep.push_back(table);
    arrays->keep.push_back(group_slots);
  }
  arrays->keep.push_back(std::move(cu_seqlens_q));
  arrays->keep.push_back(std::move(seqused_k));
  return arrays;
}

void bind_steps(py::module_& m) {
  py::class_<StepStamp>(m, "StepStamp",
                        "What a scheduled step was: its tokens [begin, end), the sequence's epoch, the version's id.")
      .def_readonly("epoch", &StepStamp::epoch)
      .def_readonly("version", &StepStamp::version)
      .def_readonly("begin", &StepStamp::begin)
      .def_readonly("end", &StepStamp::end)
      .def("__repr__", [](const StepStamp& s) {
        return "<StepStamp tokens [" + std::to_string(s.begin) + ", " + std::to_string(s.end) + ") epoch " +
               std::to_string(s.epoch) + " version " + std::to_string(s.version) + ">";
      });

  py::native_enum<PublishOutcome>(m, "PublishOutcome", "enum.Enum", "How far a publication came, and why it stopped.")
      .value("done", PublishOutcome::kDone)
      .value("busy", PublishOutcome::kBusy)
      .value("foreign_version", PublishOutcome::kForeignVersion)
      .value("unpublishable", PublishOutcome::kUnpublishable)
      .value("no_node", PublishOutcome::kNoNode)
      .finalize();

  py::class_<HashedPrefix, std::shared_ptr<HashedPrefix>>(m, "HashedPrefix",
                                                          "The keys of a conversation's whole blocks. Immutable.")
      .def_property_readonly("num_tokens", [](const HashedPrefix& p) { return p.tokens.size(); });

  py::class_<StepArrays>(m, "StepArrays", "The arrays of a step, checked once and kept alive.")
      .def(py::init(&make_step_arrays), "groups"_a, "cu_seqlens_q"_a.noconvert(), "seqused_k"_a.noconvert(), "max_tokens"_a,
           "groups: id to (block table int32 [sequences, entries], slots int64 [max_tokens]);\n"
           "cu_seqlens_q: int32 [sequences + 1]; seqused_k: int32 [sequences]. All C-contiguous and writeable.")
      .def_property_readonly("max_sequences", [](const StepArrays& a) { return a.buffers.padded_sequences; })
      .def_property_readonly("max_tokens", [](const StepArrays& a) { return a.buffers.padded_tokens; });
}

// A counter of the sequence, read under the guard.
template <class T>
auto guarded(T (Sequence::*getter)() const) {
  return [getter](SequenceHandle& self) { return (Use(self).get()->*getter)(); };
}

}  // namespace

py::tuple report_tuple(const HitReport& report, const CacheLayout& layout, bool forecast) {
  const auto losses = report.losses();
  py::tuple items(losses.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const Loss& loss = losses[i];
    const py::object group =
        loss.group < 0 ? py::object(py::none()) : py::str(layout.group(static_cast<GroupId>(loss.group)).spec.name);
    items[i] = py::make_tuple(std::string(loss_reason_name(loss.reason)), group, loss.tokens);
  }
  return py::make_tuple(report.num_prompt_tokens, report.num_hash_hit_tokens, report.num_history_tokens,
                        report.num_recoverable_tokens, items, forecast ? py::object(py::none()) : py::bool_(report.canonical),
                        report.num_restored_tokens, report.restore_bytes);
}

void bind_sequence(py::module_& m) {
  bind_steps(m);
  py::class_<SequenceHandle>(m, "Sequence", "A running request. One thread at a time; made by Allocator.admit.")
      .def(
          "report", [](SequenceHandle& s) { return report_tuple(s.report(), s.allocator()->layout(), false); },
          "(prompt, hash hit, history, recoverable, losses, canonical, restored tokens, bytes), also after free().")
      .def_property_readonly(
          "ready",
          [](SequenceHandle& s) {
            const auto restore = s.restore();
            return restore == nullptr || restore->done();
          },
          "Whether nothing is being loaded for it any more.")
      .def(
          "wait",
          [](SequenceHandle& s) {
            // Not inside a Use: another thread may free the sequence while this one waits.
            if (const auto restore = s.restore()) restore->wait();
            Use use(s);
          },
          NoGil(), "Until it is ready. AdmissionError if there is no room for what could not be restored.")
      .def(
          "when_ready",
          [](SequenceHandle& s, py::function callback) {
            const auto restore = s.restore();
            if (restore == nullptr) {
              callback();
              return;
            }
            // Copied and destroyed on other threads, so its count is only touched with the GIL.
            const std::shared_ptr<py::function> kept(new py::function(std::move(callback)), [](py::function* f) {
              const py::gil_scoped_acquire gil;
              delete f;
            });
            const py::gil_scoped_release release;
            restore->when_done([kept] {
              const py::gil_scoped_acquire gil;
              try {
                (*kept)();
              } catch (py::error_already_set& error) {
                error.discard_as_unraisable("a callback of hetkv.Sequence");
              }
            });
          },
          "callback"_a, "Called without arguments, at once or on the thread that ends the restore.")
      .def("report_text", [](SequenceHandle& s) { return s.report().to_string(s.allocator()->layout()); })
      .def_property_readonly("num_computed_tokens", &SequenceHandle::num_computed_tokens)
      .def_property_readonly("num_tokens", guarded(&Sequence::num_tokens))
      .def_property_readonly("scheduled", guarded(&Sequence::scheduled))
      .def_property_readonly("settled", guarded(&Sequence::settled))
      .def_property_readonly("accepted", guarded(&Sequence::accepted))
      .def_property_readonly("published_tokens", guarded(&Sequence::published_tokens))
      .def_property_readonly("version", guarded(&Sequence::version))
      .def_property_readonly("epoch", guarded(&Sequence::epoch))
      .def_property_readonly("ok", guarded(&Sequence::ok))
      .def_property_readonly("live", [](SequenceHandle& s) { return Use::even_if_freed(s)->live(); })
      .def(
          "append",
          [](SequenceHandle& s, const TokenArray& ids) {
            const auto span = token_span(ids, "ids", 0);
            Use(s)->append(span);
          },
          "ids"_a.noconvert())
      .def(
          "schedule",
          [](SequenceHandle& s, std::int64_t upto) {
            const Use use(s);
            StepStamp stamp;
            throw_if_refused(use->schedule(upto, &stamp), s.allocator()->layout(), "schedule");
            return stamp;
          },
          "upto"_a, NoGil())
      .def(
          "settle",
          [](SequenceHandle& s, const StepStamp& stamp, bool batch_invariant) { return Use(s)->settle(stamp, batch_invariant); },
          "stamp"_a, "batch_invariant"_a = true, NoGil())
      .def("check_version", &check_version, "StaleVersionError unless its version is the one that runs now.")
      .def("hold_acceptance", [](SequenceHandle& s) { Use(s)->hold_acceptance(); })
      .def(
          "accept", [](SequenceHandle& s, std::int64_t upto) { Use(s)->accept(upto); }, "upto"_a, NoGil())
      .def(
          "restart_from_settled", [](SequenceHandle& s) { Use(s)->restart_from_settled(); }, NoGil())
      .def(
          "wants_point", [](SequenceHandle& s, std::int64_t position) { return Use(s)->wants_point(position); }, "position"_a)
      .def(
          "stage_point",
          [](SequenceHandle& s, std::int64_t position) {
            std::vector<std::pair<int, std::uint32_t>> result;
            for (const StagedBlock& block : Use(s)->stage_point(position)) result.emplace_back(block.group, block.offset);
            return result;
          },
          "position"_a, NoGil(), "[(group id, block offset)], empty if no checkpoint is wanted or memory is short.")
      .def("commit_point", &commit_point, "position"_a, "proofs"_a, "proofs: [(group id, position of the state)], all or none.")
      .def(
          "publish",
          [](SequenceHandle& s, std::optional<std::int64_t> upto) {
            const PublishResult result = Use(s)->publish(upto.value_or(std::numeric_limits<std::int64_t>::max()));
            return std::pair(result.published_tokens, result.outcome);
          },
          "upto"_a = py::none(), NoGil(), "(published tokens, PublishOutcome)")
      .def(
          "free",
          [](SequenceHandle& s, bool turn_end) {
            const Use use = Use::even_if_freed(s);
            if (use->live()) use->free(turn_end);
          },
          "turn_end"_a = true, NoGil())
      .def(
          "block_table",
          [](SequenceHandle& s, std::int64_t group) {
            const GroupId id = group_id(s, group);
            const Use use(s);
            const auto table = use->block_table(id);
            Int32Array copy(static_cast<py::ssize_t>(table.size()));
            if (!table.empty()) std::memcpy(copy.mutable_data(), table.data(), table.size_bytes());
            return copy;
          },
          "group"_a, "A copy: int32 [blocks], offsets in units of 256 bytes.")
      .def(
          "slot_mapping",
          [](SequenceHandle& s, std::int64_t group, std::int64_t begin, std::int64_t end) {
            return slots(s, group, begin, end, &Sequence::slot_mapping, false);
          },
          "group"_a, "begin"_a, "end"_a, "int64 [end - begin]: slots of the group's own rows.")
      .def(
          "token_slots",
          [](SequenceHandle& s, std::int64_t group, std::int64_t begin, std::int64_t end) {
            return slots(s, group, begin, end, &Sequence::token_slots, true);
          },
          "group"_a, "begin"_a, "end"_a, "int64 [end - begin]: one slot per token, scratch where it completes no row.")
      .def(
          "point_block",
          [](SequenceHandle& s, std::int64_t group) { return block_or_none(Use(s)->point_block(group_id(s, group))); }, "group"_a)
      .def(
          "live_block",
          [](SequenceHandle& s, std::int64_t group) { return block_or_none(Use(s)->live_block(group_id(s, group))); }, "group"_a)
      .def("ranges_to_clear", &ranges_to_clear, "[(begin, end)] in bytes of the arena: zero them, then confirm_cleared().")
      .def("confirm_cleared", [](SequenceHandle& s) { Use(s)->confirm_cleared(); })
      .def(
          "hashed_prefix", [](SequenceHandle& s) { return std::const_pointer_cast<HashedPrefix>(Use(s)->hashed_prefix()); },
          NoGil());
}

}  // namespace hetkv
