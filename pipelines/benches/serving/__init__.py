"""Load on a real served application, from outside: what it answers, how fast, and what its processes hold.

host       the process that runs Ray and the application     questions  requests whose exact answers are known
service    that process, seen from another one               client     one request and what became of it
load       many clients, as a closed or an open loop         tally      counts and latencies of many of them
soak       minutes at a share of capacity, memory watched    memory     samples of it, their slope and its noise
overhead   through HTTP against the engine called directly   instant    a replica without an engine's work
"""
