// How many tokens of history fit beside how many windows? Plans an arena for a small hybrid model, without Python or torch.
#include <cstdint>
#include <cstdio>

#include "allocator/arena.h"
#include "allocator/layout.h"

int main() {
  using namespace hetkv;

  GroupSpec history;
  history.name = "compressed";
  history.kind = ObjectKind::kCompressedKv;
  history.compress_ratio = 4;
  history.owner_layers = {0, 2};
  history.fields = {{.name = "kv", .dtype = DType::kBFloat16, .shape = {512}}};

  GroupSpec window;
  window.name = "window";
  window.kind = ObjectKind::kSwaWindow;
  window.retention = Retention::kWindow;
  window.window = 128;
  window.owner_layers = {0, 1, 2, 3};
  window.fields = {{.name = "kv", .dtype = DType::kBFloat16, .shape = {512}}};

  const CacheLayout layout = CacheLayout::build("example", 64, {history, window});
  std::printf("%s\n", layout.describe().c_str());

  ArenaConfig config;
  config.bytes = std::uint64_t{64} << 20;
  Arena arena(layout, config);

  // A conversation of 4,096 tokens: its history, and the window blocks that resuming at its end needs. All or nothing.
  constexpr std::uint32_t kBlocks = 4096 / 64;
  BlockCounts need{};
  for (const Group& group : layout.groups()) {
    need[group.id] = group.spec.retention == Retention::kWindow ? layout.window_nodes(group.id, kBlocks) : kBlocks;
  }
  // Blocks are taken from charges and go back one by one; what a charge still holds goes back with it.
  std::uint32_t conversations = 0;
  {
    Charge charge;
    while (arena.reserve(need, {}, charge).status == ReserveOutcome::Status::kReserved) ++conversations;
    std::printf("%u conversations of %u tokens fit in %llu bytes\n", conversations, kBlocks * 64,
                static_cast<unsigned long long>(arena.bytes()));
  }
  return conversations > 0 ? 0 : 1;
}
