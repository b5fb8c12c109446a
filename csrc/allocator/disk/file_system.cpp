#include "allocator/disk/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace hetkv {
namespace {

int result(int code) { return code < 0 ? -errno : code; }

void take_over(const struct ::stat& s, FileFacts* facts) {
  facts->regular = S_ISREG(s.st_mode);
  facts->directory = S_ISDIR(s.st_mode);
  facts->owner = s.st_uid;
  facts->mode = s.st_mode & 07777;
  facts->bytes = static_cast<std::uint64_t>(s.st_size);
  facts->modified_ns = std::int64_t{s.st_mtim.tv_sec} * 1'000'000'000 + s.st_mtim.tv_nsec;
}

}  // namespace

int FileSystem::open(const std::string& path, int flags, std::uint32_t mode) {
  int file = 0;
  do {
    file = result(::open(path.c_str(), flags | O_CLOEXEC, mode));
  } while (file == -EINTR);
  return file;
}

int FileSystem::close(int file) { return result(::close(file)); }

std::int64_t FileSystem::pread(int file, std::byte* to, std::size_t bytes, std::uint64_t at) {
  const ssize_t n = ::pread(file, to, bytes, static_cast<off_t>(at));
  return n < 0 ? -errno : n;
}

std::int64_t FileSystem::pwrite(int file, const std::byte* from, std::size_t bytes, std::uint64_t at) {
  const ssize_t n = ::pwrite(file, from, bytes, static_cast<off_t>(at));
  return n < 0 ? -errno : n;
}

int FileSystem::leave_direct(int file) {
  const int flags = ::fcntl(file, F_GETFL);
  return flags < 0 ? -errno : result(::fcntl(file, F_SETFL, flags & ~O_DIRECT));
}

int FileSystem::sync_data(int file) { return result(::fdatasync(file)); }
int FileSystem::sync(int file) { return result(::fsync(file)); }

int FileSystem::facts(int file, FileFacts* facts) {
  struct ::stat s{};
  const int code = result(::fstat(file, &s));
  if (code == 0) take_over(s, facts);
  return code;
}

int FileSystem::facts_of(const std::string& path, FileFacts* facts) {
  struct ::stat s{};
  const int code = result(::lstat(path.c_str(), &s));
  if (code == 0) take_over(s, facts);
  return code;
}

int FileSystem::make_directory(const std::string& path, std::uint32_t mode) { return result(::mkdir(path.c_str(), mode)); }
int FileSystem::remove(const std::string& path) { return result(::unlink(path.c_str())); }
int FileSystem::remove_directory(const std::string& path) { return result(::rmdir(path.c_str())); }

int FileSystem::publish(const std::string& temporary, const std::string& name) {
  int code = result(::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, name.c_str(), RENAME_NOREPLACE));
  if (code != -EINVAL && code != -ENOSYS) return code;
  code = result(::link(temporary.c_str(), name.c_str()));  // a file system without it
  if (code == 0) ::unlink(temporary.c_str());
  return code;
}

int FileSystem::replace(const std::string& temporary, const std::string& name) {
  return result(::rename(temporary.c_str(), name.c_str()));
}

int FileSystem::list(const std::string& path, const std::function<void(const char* name)>& each) {
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) return -errno;
  errno = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") each(entry->d_name);
    errno = 0;
  }
  const int code = -errno;
  ::closedir(directory);
  return code;
}

int FileSystem::lock(int file) { return result(::flock(file, LOCK_EX | LOCK_NB)); }

FileSystem& FileSystem::system() {
  static FileSystem files;
  return files;
}

int read_fully(FileSystem& files, int file, std::byte* to, std::size_t bytes, std::uint64_t at) {
  bool buffered = false;
  while (bytes > 0) {
    const std::int64_t n = files.pread(file, to, bytes, at);
    if (n == -EINTR) continue;
    if (n == -EINVAL && !std::exchange(buffered, true) && files.leave_direct(file) == 0) continue;
    if (n < 0) return static_cast<int>(n);
    if (n == 0) return -ENODATA;
    to += n;
    bytes -= static_cast<std::size_t>(n);
    at += static_cast<std::uint64_t>(n);
  }
  return 0;
}

int write_fully(FileSystem& files, int file, const std::byte* from, std::size_t bytes, std::uint64_t at) {
  bool buffered = false;
  while (bytes > 0) {
    const std::int64_t n = files.pwrite(file, from, bytes, at);
    if (n == -EINTR) continue;
    if (n == -EINVAL && !std::exchange(buffered, true) && files.leave_direct(file) == 0) continue;
    if (n < 0) return static_cast<int>(n);
    if (n == 0) return -ENOSPC;
    from += n;
    bytes -= static_cast<std::size_t>(n);
    at += static_cast<std::uint64_t>(n);
  }
  return 0;
}

}  // namespace hetkv
