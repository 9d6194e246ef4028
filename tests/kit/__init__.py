"""What tests are built of: requests, views, replicas, simulated runs, scenarios, and the books of a replica."""
