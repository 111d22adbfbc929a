"""One model over several devices and processes: shards, stages, replicas, and the processes that run them."""
