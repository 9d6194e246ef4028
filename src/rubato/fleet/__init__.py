"""One replica's loop, the cluster of replicas, fair shares between tenants, the event bus, replicas on Ray."""
