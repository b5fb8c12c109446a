# What every target of hetkv shares: warnings and the planted fault.

find_package(Threads REQUIRED)

# Private to the build: never exported, never in CMAKE_CXX_FLAGS.
add_library(hetkv_warnings INTERFACE)
target_compile_options(hetkv_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow -Wsign-conversion>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
if(HETKV_WERROR)
  target_compile_options(hetkv_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(HETKV_PLANTED_FAULT AND NOT HETKV_PLANTED_FAULT_SOURCES)
  target_compile_definitions(hetkv_warnings INTERFACE ${HETKV_PLANTED_FAULT})
endif()

# hetkv_target(name): warnings, and the planted fault if one of its sources is to see it.
function(hetkv_target target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:hetkv_warnings>)
  if(HETKV_PLANTED_FAULT)
    get_target_property(sources ${target} SOURCES)
    foreach(source IN LISTS sources)
      get_filename_component(path "${source}" ABSOLUTE)
      file(RELATIVE_PATH path "${PROJECT_SOURCE_DIR}" "${path}")
      if(path IN_LIST HETKV_PLANTED_FAULT_SOURCES)
        set_source_files_properties("${source}" PROPERTIES COMPILE_DEFINITIONS ${HETKV_PLANTED_FAULT})
      endif()
    endforeach()
  endif()
endfunction()
