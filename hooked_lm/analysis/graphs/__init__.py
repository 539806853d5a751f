"""Attribution graphs: which features and tokens a logit follows from, and which make a head attend where it does."""
