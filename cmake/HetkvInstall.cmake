# `cmake --install`: the C++ library for find_package(hetkv). Headers lie in include/hetkv, included as "allocator/arena.h".
include(CMakePackageConfigHelpers)

install(TARGETS hetkv_base hetkv_allocator EXPORT hetkvTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY csrc/base csrc/allocator DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/hetkv FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/hetkv)
install(EXPORT hetkvTargets NAMESPACE hetkv:: DESTINATION ${package_folder})
configure_package_config_file(cmake/hetkvConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/hetkvConfig.cmake"
  INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/hetkvConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/hetkvConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/hetkvConfigVersion.cmake"
  DESTINATION ${package_folder})
