// The server's errors in simplified Chinese, by their codes. {param} is the field of the request.

export const CHINESE_ERRORS = {
  adapter_not_found: "服务器上没有这个适配器。",
  deadline_exceeded: "回答超过了服务器允许的时间，已被中止。请减少 token 数后再试。",
  engine_dead: "引擎已经停止，原因请看服务器的日志。",
  host_not_allowed: "服务器不接受发往这个主机名的请求。",
  internal_error: "服务器处理这个请求时出错，详情请看服务器的日志。",
  invalid_api_key: "API 密钥缺失或不正确。",
  invalid_json: "服务器读不懂这个请求。",
  invalid_request: "服务器无法处理这个请求。",
  invalid_type: "请求中的 {param} 类型不对。",
  invalid_value: "请求中的 {param} 取值不合适。",
  machine_away: "有一台机器不在，这个请求无法计算。",
  method_not_allowed: "服务器不接受这样的请求。",
  missing_required_parameter: "请求缺少 {param}。",
  model_loading: "模型还在加载。",
  model_not_found: "服务器上没有这个模型。",
  model_unavailable: "这个模型现在无法加载，请稍后再试。",
  model_not_loaded: "这个模型没有加载。",
  overloaded: "服务器正忙，请稍后再试。",
  queue_timeout: "服务器正忙，等待的时间太长，请稍后再试。",
  request_failed: "这个请求无法计算。",
  request_timeout: "请求发送得太慢，服务器没有等到全部内容。",
  request_too_large: "请求太大，服务器不接受。",
  shutting_down: "服务器正在关闭。",
  step_failed: "计算这个请求时出错。",
  string_above_max_length: "文本太长：{param} 超过了服务器的上限。",
  unknown_parameter: "服务器不认识请求中的 {param}。",
  unknown_url: "服务器上没有这个地址。",
  unsupported_endpoint: "这个模型不支持这种请求。",
  unsupported_media_type: "服务器不接受这种格式的请求。",
  unsupported_parameter: "服务器不支持请求中的 {param}。",
};

/** By the first digit of the status, for codes that the page does not know. */
export const CHINESE_STATUS = {
  0: "出错了。",
  4: "服务器拒绝了这个请求。",
  5: "服务器出错了。",
};
