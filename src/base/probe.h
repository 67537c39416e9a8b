// Static probes (USDT): places in the code where a tracer can stop a running program and read
// arguments. A probe is one `nop`. A note in the ELF file names the place and says where its
// arguments are; the format is that of SystemTap's <sys/sdt.h>, version 3. Nothing on other
// processors than x86-64.
#pragma once

#include <cstdint>

#ifdef __x86_64__
/// The probe spinwire:`name`, with two texts that end with 0, or are null, and two numbers between
/// them.
#define SPINWIRE_PROBE(name, whose, index, generation, text)                                 \
  asm volatile(                                                                              \
      "990: nop\n"                                                                           \
      ".pushsection .note.stapsdt,\"?\",\"note\"\n"                                          \
      ".balign 4\n"                                                                          \
      ".4byte 992f-991f, 994f-993f, 3\n"                                                     \
      "991: .asciz \"stapsdt\"\n"                                                            \
      "992: .balign 4\n"                                                                     \
      "993: .8byte 990b, _.stapsdt.base, 0\n"                                                \
      ".asciz \"spinwire\"\n"                                                                \
      ".asciz \"" #name                                                                      \
      "\"\n"                                                                                 \
      ".asciz \"8@%[probe_whose] 4@%[probe_index] 4@%[probe_generation] 8@%[probe_text]\"\n" \
      "994: .balign 4\n"                                                                     \
      ".popsection\n" /* Tracers find by this symbol how far a linker has moved the code. */ \
      ".ifndef _.stapsdt.base\n"                                                             \
      ".pushsection .stapsdt.base,\"aG\",\"progbits\",.stapsdt.base,comdat\n"                \
      ".weak _.stapsdt.base\n"                                                               \
      ".hidden _.stapsdt.base\n"                                                             \
      "_.stapsdt.base: .space 1\n"                                                           \
      ".size _.stapsdt.base, 1\n"                                                            \
      ".popsection\n"                                                                        \
      ".endif\n"                                                                             \
      :                                                                                      \
      : [probe_whose] "r"(static_cast<const char*>(whose)),                                  \
        [probe_index] "r"(static_cast<std::uint32_t>(index)),                                \
        [probe_generation] "r"(static_cast<std::uint32_t>(generation)),                      \
        [probe_text] "r"(static_cast<const char*>(text))                                     \
      : "memory")
#else
#define SPINWIRE_PROBE(name, whose, index, generation, text) \
  static_cast<void>((whose), (index), (generation), (text))
#endif
