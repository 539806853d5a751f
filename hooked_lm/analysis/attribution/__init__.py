"""Attribution: the effects of nodes and edges, estimated from gradients and compared with exact patching."""
