"""Engine replicas as Serve knows them (replica.py): models on a shelf, leases, health, routing, autoscaling."""
