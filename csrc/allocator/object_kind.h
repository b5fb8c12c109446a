// Kinds of cache objects, the operations on them, and the one table that says which pairs are legal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace hetkv {

enum class ObjectKind : std::uint8_t {
  kFullKv,            // one row a token, kept for the whole prefix
  kCompressedKv,      // one row per compress_ratio tokens, kept for the whole prefix
  kUncompressedTail,  // raw compressor inputs of an unfinished window, and its overlap; valid at one position
  kSwaWindow,         // rows of the last W-1 tokens
  kIndexerState,      // keys that select rows of another group; kept for the whole prefix
  kRecurrentState,    // a snapshot, valid at one position
  kDiskPrefix,        // a persisted copy of any of them
};
inline constexpr std::size_t kNumKinds = 7;

enum class Operation : std::uint8_t {
  kReserve,         // ask for memory blocks
  kAppendRows,      // write rows of new tokens in place
  kPublishHistory,  // become part of a node's history set
  kPublishPoint,    // become a point set of a node
  kSlide,           // drop rows left of the window
  kSnapshot,        // save the whole state at one position
  kPin,
  kEvict,
  kSpill,    // copy to a lower tier
  kRestore,  // copy back
  kVerify,
};
inline constexpr std::size_t kNumOperations = 11;

constexpr std::string_view kind_name(ObjectKind kind) {
  constexpr std::array<std::string_view, kNumKinds> names{"full_kv",       "compressed_kv",   "uncompressed_tail", "swa_window",
                                                          "indexer_state", "recurrent_state", "disk_prefix"};
  return names[static_cast<std::size_t>(kind)];
}

constexpr std::string_view operation_name(Operation operation) {
  constexpr std::array<std::string_view, kNumOperations> names{
      "reserve", "append_rows", "publish_history", "publish_point", "slide", "snapshot",
      "pin",     "evict",       "spill",           "restore",       "verify"};
  return names[static_cast<std::size_t>(operation)];
}

// Rows: kinds. Columns: operations, in the order of the enums.
inline constexpr std::array<std::array<bool, kNumOperations>, kNumKinds> kRoutes{{
    //                    reserve append  pubH   pubP   slide  snap   pin   evict spill restore verify
    /* full_kv */ {true, true, true, false, false, false, true, true, true, true, true},
    /* compressed_kv */ {true, true, true, false, false, false, true, true, true, true, true},
    /* uncompressed_tail*/ {true, true, false, true, false, true, true, true, true, true, true},
    /* swa_window */ {true, true, false, true, true, false, true, true, true, true, true},
    // An index that is rewritten rather than appended is a snapshot, so both publications are legal.
    /* indexer_state */ {true, true, true, true, false, true, true, true, true, true, true},
    /* recurrent_state */ {true, false, false, true, false, true, true, true, true, true, true},
    // A persisted copy is never written in place and needs no memory block of its own.
    /* disk_prefix */ {false, false, false, false, false, false, true, true, false, true, true},
}};

constexpr bool is_legal(ObjectKind kind, Operation operation) {
  return kRoutes[static_cast<std::size_t>(kind)][static_cast<std::size_t>(operation)];
}

// Throws RouteError if the table forbids the pair. Thread-safe; allocates only to throw.
inline void require_route(ObjectKind kind, Operation operation) {
  if (!is_legal(kind, operation)) [[unlikely]]
    throw RouteError(std::string(kind_name(kind)), std::string(operation_name(operation)));
}

}  // namespace hetkv
