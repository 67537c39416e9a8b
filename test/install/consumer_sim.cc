// A program outside the tree that simulates two nodes for a while. Prints the version.
#include <spinwire/sim.h>
#include <spinwire/version.h>

#include <cstdio>
#include <string>

int main() {
  auto simulation = spinwire::Simulation::create(1);
  if (!simulation) return 1;
  for (int node = 0; node < 2; ++node) {
    if (!simulation->add(spinwire::Simulation::config())) return 1;
  }
  for (int step = 0; step < 1000; ++step) (void)simulation->step();
  if (!simulation->audit()) return 1;
  std::printf("%s\n", std::string(spinwire::version()).c_str());
  return 0;
}
