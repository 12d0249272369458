"""What the control plane does, whichever API asks: instances, the hub, pools, the sweep, access, bundles, traces."""
