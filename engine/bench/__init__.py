"""`octavo bench`: latency and throughput of a user's own model, and the fixed workloads that peers ran too."""
