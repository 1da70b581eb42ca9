
table_descriptor {
  name: "users"
  vocabulary_size: 100
  dimension: 8
  optimization_parameters { learning_rate { constant: 0.1 } adagrad {} }
}
table_descriptor {
  name: "items"
  vocabulary_size: 50
  dimension: 4
  optimization_parameters {
    learning_rate { dynamic { tag: 0 } }
    adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 use_sum_inside_sqrt: true }
  }
}
mode: TRAINING
num_hosts: 1
num_tensor_cores: 2
feature_descriptor { name: "user" table_id: 0 input_shape: 16 }
feature_descriptor { name: "clicked" table_id: 1 input_shape: 16 input_shape: 5 }
