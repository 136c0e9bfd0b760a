"""What `normscope.transforms.fold` is made of: the linear maps, the plan, its obstacles, and carrying it out."""
