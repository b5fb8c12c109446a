// FileSystem: the system calls that the disk tier makes, and nothing else. Tests inject faults below this line.
//
// Every call answers as the system does, with -errno in place of -1: EINTR, short reads and short writes come through, and the
// functions below deal with them. All methods are thread-safe and block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace hetkv {

struct FileFacts {
  bool regular = false, directory = false;
  std::uint32_t owner = 0, mode = 0;  // mode: permission bits
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(const std::string& path, int flags, std::uint32_t mode);
  virtual int close(int file);
  virtual std::int64_t pread(int file, std::byte* to, std::size_t bytes, std::uint64_t at);
  virtual std::int64_t pwrite(int file, const std::byte* from, std::size_t bytes, std::uint64_t at);
  virtual int leave_direct(int file);  // from here on through the page cache
  virtual int sync_data(int file);
  virtual int sync(int file);
  virtual int facts(int file, FileFacts* facts);                    // of an open file
  virtual int facts_of(const std::string& path, FileFacts* facts);  // of a name, links not followed
  virtual int make_directory(const std::string& path, std::uint32_t mode);
  virtual int remove(const std::string& path);
  virtual int remove_directory(const std::string& path);
  // Gives the file a name that must not exist yet, and takes away the old one. -EEXIST if it does.
  virtual int publish(const std::string& temporary, const std::string& name);
  virtual int replace(const std::string& temporary, const std::string& name);
  virtual int list(const std::string& path, const std::function<void(const char* name)>& each);
  virtual int lock(int file);  // exclusive, at once or -EWOULDBLOCK; gone with the process

  static FileSystem& system();
};

// Loop over EINTR and partial transfers; after one that ends at an odd place a file opened O_DIRECT goes on through the page cache.
// 0, -errno, or for reads -ENODATA at an early end of the file.
int read_fully(FileSystem& files, int file, std::byte* to, std::size_t bytes, std::uint64_t at);
int write_fully(FileSystem& files, int file, const std::byte* from, std::size_t bytes, std::uint64_t at);

// An open file that is closed with its scope. A negative number is an error and nothing to close.
class OpenFile {
 public:
  OpenFile(FileSystem& files, int file) : files_(files), file_(file) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (file_ >= 0) files_.close(file_);
  }
  int number() const { return file_; }
  int error() const { return file_ < 0 ? file_ : 0; }
  explicit operator bool() const { return file_ >= 0; }
  int release() {
    const int file = file_;
    file_ = -1;
    return file;
  }

 private:
  FileSystem& files_;
  int file_;
};

}  // namespace hetkv
