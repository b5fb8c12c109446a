# The interpreter, pybind11 and torch. Torch's own CMake package is not used: it brings flags and a CUDA discovery of its own.
# The interpreter says where torch is (it is looked up, not imported) and hetkv::torch is an imported target for it.

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

function(hetkv_package_folder out package)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('${package}'); print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

if(NOT pybind11_DIR)  # a build through pip has it on the prefix path; a plain cmake asks the interpreter
  hetkv_package_folder(folder pybind11)
  if(folder)
    list(APPEND CMAKE_PREFIX_PATH "${folder}")
  endif()
endif()
find_package(pybind11 3.0 CONFIG REQUIRED)

hetkv_package_folder(torch_folder torch)
set(torch_version "none")
if(torch_folder AND EXISTS "${torch_folder}/version.py")
  file(STRINGS "${torch_folder}/version.py" line REGEX "^__version__ *=")
  if(line MATCHES "([0-9]+\\.[0-9]+(\\.[0-9]+)?)")
    set(torch_version "${CMAKE_MATCH_1}")
  endif()
endif()
if(torch_version STREQUAL "none" OR torch_version VERSION_LESS 2.10)
  # Indented, so that CMake keeps it on one line.
  message(FATAL_ERROR "  hetkv needs torch >= 2.10 in ${Python_EXECUTABLE} (found: ${torch_version}): "
                      "install torch there, then build with `pip install --no-build-isolation .`")
endif()
message(STATUS "hetkv: torch ${torch_version} in ${torch_folder}")

# libtorch.so pulls in libtorch_cuda where there is one. Both are named, since torch's libraries are not in the global scope.
add_library(hetkv_torch INTERFACE)
add_library(hetkv::torch ALIAS hetkv_torch)
target_include_directories(hetkv_torch SYSTEM INTERFACE "${torch_folder}/include")
# The floor of the stable ABI: 2.10. It also forbids every unstable torch header.
target_compile_definitions(hetkv_torch INTERFACE TORCH_TARGET_VERSION=0x020a000000000000)
target_link_options(hetkv_torch INTERFACE "LINKER:--no-as-needed")
target_link_libraries(hetkv_torch INTERFACE "${torch_folder}/lib/libtorch.so" "${torch_folder}/lib/libtorch_cpu.so")
