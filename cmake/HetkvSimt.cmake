# CUDA sources on the CPU: see tests/simt/README.md. No CUDA toolkit is involved.

# hetkv_simt_kernel(source.cu ...): builds each source with the host compiler as the library hetkv_simt_<name>. A relative path is
# looked up in the current folder, then in csrc/kernels/cuda.
function(hetkv_simt_kernel)
  foreach(source IN LISTS ARGN)
    get_filename_component(name "${source}" NAME_WE)
    set(path "${CMAKE_CURRENT_SOURCE_DIR}/${source}")
    if(NOT EXISTS "${path}")
      set(path "${PROJECT_SOURCE_DIR}/csrc/kernels/cuda/${source}")
    endif()
    set(folder "${PROJECT_SOURCE_DIR}/tests/simt")
    set_source_files_properties("${path}" PROPERTIES LANGUAGE CXX)
    add_library(hetkv_simt_${name} OBJECT "${path}")
    target_compile_definitions(hetkv_simt_${name} PRIVATE HETKV_SIMT HETKV_SIMT_KERNEL)
    # SYSTEM: with -fno-weak gcc warns of every inline variable, which is harmless for constants.
    target_include_directories(hetkv_simt_${name} SYSTEM BEFORE PRIVATE "${folder}/device" "${PROJECT_SOURCE_DIR}/csrc")
    hetkv_target(hetkv_simt_${name})
    # -fsanitize=thread only to have every access announced to tsan_hooks.cpp; the sanitizer itself is never linked. -fno-weak
    # keeps inline functions local, so that the uninstrumented copies of other objects do not replace these. Structs stay whole
    # (no-tree-sra), so that a 16-byte access is seen as one. The debug information is for reports.
    target_compile_options(hetkv_simt_${name} PRIVATE
      -O1 -g1 -fsanitize=thread --param tsan-instrument-func-entry-exit=0 -fno-weak -fno-tree-sra
      -Wno-unknown-pragmas -include cuda_runtime.h)
  endforeach()
endfunction()

# hetkv_simt_test(test_x KERNELS x.cu ... [LINK hetkv_kernels]): test_x.cpp with these kernels, as the executable simt_test_x. LINK: for
# tests that compare with the CPU op.
function(hetkv_simt_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "KERNELS;LINK")
  add_executable(simt_${name} ${name}.cpp)
  target_link_libraries(simt_${name} PRIVATE hetkv_simt hetkv_base ${arg_LINK} GTest::gtest_main)
  foreach(source IN LISTS arg_KERNELS)
    get_filename_component(kernel "${source}" NAME_WE)
    target_link_libraries(simt_${name} PRIVATE hetkv_simt_${kernel})
  endforeach()
  hetkv_target(simt_${name})
  add_dependencies(hetkv_simt_tests simt_${name})
  gtest_discover_tests(simt_${name} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS simt TIMEOUT 120)
endfunction()
