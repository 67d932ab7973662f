// The flows of benchmarks/network.py in SimGrid (https://simgrid.org), to compare speed and finishing times.
//
//     g++ -O2 -std=c++17 simgrid_flows.cpp -lsimgrid -o simgrid_flows
//
// Reads the number of nodes, bytes per second in and out of each, the number of flows, and in the order of their starts:
// start in seconds, source, destination, bytes. Writes the seconds of the processor that the simulation took, and when
// each flow has ended. Links share max-min fairly, without latency, windows or factors of protocols.

#include <simgrid/s4u.hpp>

#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

namespace sg4 = simgrid::s4u;

struct Flow {
  double start_s;
  int source;
  int destination;
  double nbytes;
};

int main(int argc, char** argv) {
  int n_nodes = 0, n_flows = 0;
  double capacity_Bps = 0;
  if (std::scanf("%d %lf %d", &n_nodes, &capacity_Bps, &n_flows) != 3) return 2;
  std::vector<Flow> flows(n_flows);
  for (auto& flow : flows)
    if (std::scanf("%lf %d %d %lf", &flow.start_s, &flow.source, &flow.destination, &flow.nbytes) != 4) return 2;

  sg4::Engine engine(&argc, argv);
  for (const char* setting : {"network/model:CM02", "network/bandwidth-factor:1", "network/latency-factor:1",
                              "network/TCP-gamma:0", "network/weight-S:0", "network/crosstraffic:0",
                              "surf/precision:1e-12", "maxmin/precision:1e-12"})
    sg4::Engine::set_config(setting);
  auto* zone = sg4::create_full_zone("nodes");
  std::vector<sg4::Host*> hosts;
  std::vector<sg4::Link*> out, in;
  for (int node = 0; node < n_nodes; node++) {
    hosts.push_back(zone->create_host("node" + std::to_string(node), 1e9)->seal());
    out.push_back(zone->create_link("out" + std::to_string(node), capacity_Bps)->set_latency(0)->seal());
    in.push_back(zone->create_link("in" + std::to_string(node), capacity_Bps)->set_latency(0)->seal());
  }
  for (int source = 0; source < n_nodes; source++)
    for (int destination = 0; destination < n_nodes; destination++)
      if (source != destination)
        zone->add_route(hosts[source]->get_netpoint(), hosts[destination]->get_netpoint(), nullptr, nullptr,
                        {sg4::LinkInRoute(out[source]), sg4::LinkInRoute(in[destination])}, false);
  zone->seal();

  std::vector<sg4::CommPtr> comms(n_flows);
  sg4::Actor::create("driver", hosts[0], [&flows, &hosts, &comms, n_flows]() {
    for (int number = 0; number < n_flows; number++) {
      const auto& flow = flows[number];
      sg4::this_actor::sleep_until(flow.start_s);
      comms[number] = sg4::Comm::sendto_init(hosts[flow.source], hosts[flow.destination]);
      comms[number]->set_payload_size(static_cast<uint64_t>(flow.nbytes));
      comms[number]->start();
    }
    for (auto& comm : comms) comm->wait();
  });
  const auto begin = std::clock();
  engine.run();
  std::printf("%.6f\n", static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  for (auto& comm : comms) std::printf("%.17g\n", comm->get_finish_time());
  return 0;
}
